// Top-p: the smallest set of likeliest tokens that has the wanted mass, without sorting and in one pass over the row.
// A sample says near which logit the edge is; the pass adds up all weights and those from there on, so that only the
// few tokens which that mass lacks, or has too many, must be listed and put in order. Where the sample misled, more are
// listed.
#include <cmath>
#include <cstring>

#include "sampler_task.h"

namespace maitred {
namespace {

// A nucleus is first sought among about this many of the largest logits.
constexpr int64_t kFewCandidates = 128;
// By how many standard deviations a sample is trusted.
constexpr double kDeviations = 3.0;
// Below this a sort is cheaper than another partition.
constexpr int64_t kSortAtMost = 48;
// A list is searched by quarters.
constexpr int kNumCuts = 4;
// The sample has two vectors of kLanes logits of each block, so each of its logits speaks for so many.
constexpr int64_t kVectors = 2;
constexpr double kSpokenFor = static_cast<double>(kBlock) / (kVectors * kLanes);
// What lies this much below the largest, in natural logarithms, has no mass to speak of.
constexpr double kDeepest = 50.0;

// What a sample says of a part of the row's mass.
struct Guess {
  double mass = 0.0, variance = 0.0;

  void add(int count, double weight) {
    mass += kSpokenFor * count * weight;
    variance += kSpokenFor * kSpokenFor * count * weight * weight;
  }
  double doubt() const { return kDeviations * std::sqrt(variance); }
};

}  // namespace

// Even buckets of a sample's logits downwards from `top`; the last is without end.
struct Sampler::Buckets {
  static constexpr int kCount = 512;
  float top, per_logit;
  int counts[kCount] = {};
  double weights[kCount];  // of a logit in each one's middle
  Guess all;

  Buckets(float top, float bottom, double sharpness) : top(top) {
    const double span = std::min(static_cast<double>(top) - bottom, kDeepest / sharpness);
    per_logit = span > 0.0 ? static_cast<float>(kCount / span) : 0.0F;
  }
  int of(float logit) const {
    const float bucket = (top - logit) * per_logit;
    return static_cast<int>(bucket < kCount - 1 ? bucket : kCount - 1);
  }
  float at(float bucket) const { return top - bucket / per_logit; }
  float end_of(int bucket) const { return bucket < kCount - 1 ? at(static_cast<float>(bucket + 1)) : -kInfinity; }
  // The last bucket to be looked at for `mass` below the end of one.
  int last_below(int bucket, double mass) const {
    Guess found;
    for (++bucket; bucket < kCount - 1; ++bucket) {
      found.add(counts[bucket], weights[bucket]);
      if (is_enough(found, bucket, mass)) break;
    }
    return bucket;
  }
  // How far up to look for `mass` above a bucket's end.
  float first_above(int bucket, double mass) const {
    Guess found;
    for (; bucket >= 0; --bucket) {
      found.add(counts[bucket], weights[bucket]);
      if (is_enough(found, bucket, mass)) return end_of(bucket - 1);
    }
    return kInfinity;
  }
  bool is_enough(Guess found, int bucket, double mass) const {
    const double guessed = found.mass;
    found.add(1, weights[bucket]);  // nothing found is no certainty
    return guessed - found.doubt() >= mass;
  }
};

int64_t Sampler::Task::draw_nucleus(const SampleRow& row) {
  const float listed = std::max(floor, about_few());
  collect(listed, kInfinity);
  weigh_list();
  if (listed == floor) return draw_from_list(row);
  const double listed_mass = list_mass();
  const Buckets below = buckets_below(listed);
  if (listed_mass > row.top_p * (listed_mass + below.all.mass + below.all.doubt())) {
    weigh_all(floor);
    const double total = sum_of(scratch.block_sums), needed = row.top_p * total;
    if (listed_mass >= needed) return draw_from_list(row, needed, margin_of(row.top_p, 0.0, total));
  }
  return draw_from_blocks(row.share, edge_near(below, likely_bucket(below, row.top_p, listed_mass), row.top_p));
}

// A logit that about kFewCandidates reach; -inf where there are few more.
float Sampler::Task::about_few() const {
  constexpr int64_t kEach = 16;  // of so many groups one is asked
  constexpr int64_t kLast = kFewCandidates / kEach;
  float best[kLast + 1];
  std::fill(best, best + kLast + 1, -kInfinity);
  for (size_t i = 0; i < scratch.groups.size(); i += kEach) {
    const float value = scratch.groups[i];
    if (value <= best[kLast]) continue;
    int64_t place = kLast;
    for (; place > 0 && best[place - 1] < value; --place) best[place] = best[place - 1];
    best[place] = value;
  }
  return best[kLast];
}

// A sample of the logits from the floor on that are below `listed`.
Sampler::Buckets Sampler::Task::buckets_below(float listed) {
  constexpr int64_t kStride = 29;  // any odd number: a block's vectors take turns
  constexpr int64_t kTurns = kBlock / kLanes / kVectors;
  auto& values = scratch.folded;
  values.resize((vocab_size + kBlock - 1) / kBlock * kVectors * kLanes);
  float* value = values.data();
  for (int64_t block = 0; block * kBlock < vocab_size; ++block) {
    for (int64_t vector = block * kStride % kTurns; vector < kTurns * kVectors; vector += kTurns, value += kLanes)
      std::memcpy(value, logits + std::min(block * kBlock + vector * kLanes, vocab_size - kLanes), kLanes * 4);
  }
  float lowest = listed;
  for (size_t i = 0; i < values.size(); i += 4)
    if (values[i] < lowest && values[i] >= floor) lowest = values[i];
  Buckets buckets(listed, lowest, sharpness);
  for (float logit : values)
    if (logit >= floor && logit < listed) ++buckets.counts[buckets.of(logit)];
  ++buckets.counts[0];  // as if `listed` had been found once more: a sample may miss the heaviest
  float middles[Buckets::kCount];
  for (int bucket = 0; bucket < Buckets::kCount; ++bucket)
    middles[bucket] = buckets.at(static_cast<float>(bucket) + 0.5F);
  kernels.weights(middles, Buckets::kCount, largest, sharpness, buckets.weights);
  for (int bucket = 0; bucket < Buckets::kCount; ++bucket)
    buckets.all.add(buckets.counts[bucket], buckets.weights[bucket]);
  return buckets;
}

// The bucket at whose end the edge is likely to be; -1 is before the first.
int Sampler::Task::likely_bucket(const Buckets& below, double top_p, double listed_mass) const {
  const double needed = top_p * (listed_mass + below.all.mass);
  Guess above;
  int bucket = -1;
  while (bucket < Buckets::kCount - 2 && listed_mass + above.mass < needed) {
    ++bucket;
    above.add(below.counts[bucket], below.weights[bucket]);
  }
  return bucket;
}

// The edge of the nucleus, near a bucket's end; block_sums become those of the nucleus.
Sampler::Edge Sampler::Task::edge_near(const Buckets& buckets, int bucket, double top_p) {
  const size_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
  const float middle = std::max(floor, buckets.end_of(bucket));
  auto& sums = scratch.cut_sums;
  weigh_two({floor, middle});
  const double total = sum_of(sums.data(), num_blocks), needed = top_p * total;
  const double from_middle = sum_of(&sums[num_blocks], num_blocks), lacking = needed - from_middle;
  scratch.block_sums.assign(&sums[num_blocks], &sums[num_blocks] + num_blocks);
  // From below the middle the nucleus has what is up to the edge, from above it lacks what is beyond.
  const bool is_below = lacking > 0.0;
  float low = is_below ? std::max(floor, buckets.end_of(buckets.last_below(bucket, lacking))) : middle;
  float high = is_below ? middle : buckets.first_above(bucket, -lacking);
  list_between(low, high);
  double listed = list_mass();
  if (is_below ? from_middle + listed < needed : from_middle - listed >= needed) {  // the sample misled us
    if (is_below)
      low = floor;
    else
      high = kInfinity;
    list_between(low, high);
    listed = list_mass();
  }
  if (!is_below) removed = listed;
  const bool has_largest = high == kInfinity;  // then nothing is above the list
  const double above = has_largest ? 0.0 : is_below ? from_middle : from_middle - listed;
  const double margin = has_largest ? margin_of(top_p, 0.0, total) : margin_of(top_p, from_middle, total - from_middle);
  const Item last = edge_item(needed - above, margin, low, std::min(high, largest));
  const Edge edge{scratch.values[last.id], id_of_listed(last.id, low, high)};
  add_to_blocks(last, is_below);
  return edge;
}

// cut_sums of all blocks from each of two lows on.
void Sampler::Task::weigh_two(std::array<float, 2> lows) {
  auto& sums = scratch.cut_sums;
  sums.resize(2 * ((vocab_size + kBlock - 1) / kBlock));
  if (error > 0.0)
    kernels.weigh_two_roughly(logits, vocab_size, lows.data(), largest, sharpness, next, sums.data());
  else
    kernels.weigh_two(logits, vocab_size, lows.data(), largest, sharpness, sums.data());
}

// A list without ids.
void Sampler::Task::list_between(float low, float high) {
  list_blocks(low, scratch.values, [&](int64_t begin, int64_t count, float* found) {
    return kernels.collect_values(logits + begin, count, low, high, found);
  });
  weigh_values();
}

// The id of the list's value at `index`, for a list_between(low, high).
int64_t Sampler::Task::id_of_listed(int64_t index, float low, float high) const {
  const auto& starts = scratch.starts;
  const int64_t block = std::upper_bound(starts.begin(), starts.end(), index) - starts.begin() - 1;
  const int64_t begin = block * kBlock;
  int32_t ids[kBlock + kLanes];
  kernels.collect(logits + begin, std::min<int64_t>(kBlock, vocab_size - begin), low, high, static_cast<int32_t>(begin),
                  ids);
  return ids[index - starts[block]];
}

double Sampler::Task::list_mass() const {
  const float lows[2] = {-kInfinity, kInfinity};
  double sums[2];
  kernels.add_from_two(scratch.values.data(), scratch.weights.data(), static_cast<int64_t>(scratch.values.size()), lows,
                       sums);
  return sums[0];
}

// Adds to block_sums what the list has up to `last`, or takes from it what the list has beyond.
void Sampler::Task::add_to_blocks(const Item& last, bool adds) {
  auto& values = scratch.values;
  const float edge = values[last.id], lows[2] = {-kInfinity, edge};
  for (size_t i = last.id + 1; i < values.size(); ++i)
    if (values[i] == edge) values[i] = -kInfinity;
  for (size_t block = 0; block < scratch.block_sums.size(); ++block) {
    const int64_t begin = scratch.starts[block], end = scratch.starts[block + 1];
    if (begin == end) continue;
    double sums[2];
    kernels.add_from_two(&values[begin], &scratch.weights[begin], end - begin, lows, sums);
    double& sum = scratch.block_sums[block];
    sum = std::max(0.0, sum + (adds ? sums[1] : sums[1] - sums[0]));
  }
}

// The item, its id a place in the list, at which the list's weights, largest first, reach `needed`, which may be wrong
// by `margin`; all of its logits are from `low` to `high`.
Sampler::Item Sampler::Task::edge_item(double needed, double margin, float low, float high) {
  const auto& values = scratch.values;
  const int64_t count = static_cast<int64_t>(values.size());
  needed = std::min(needed, list_mass());
  double above = 0.0;  // the weight from `beyond` on
  float beyond = kInfinity;
  for (int64_t many = count; many > kSortAtMost; many /= kNumCuts) {
    float lows[kNumCuts];
    for (int cut = 0; cut < kNumCuts; ++cut) lows[cut] = low + (high - low) * static_cast<float>(cut) / kNumCuts;
    double sums[kNumCuts];
    kernels.add_from_four(values.data(), scratch.weights.data(), count, lows, sums);
    int cut = kNumCuts - 1;
    for (; cut > 0 && sums[cut] < needed; --cut) {
      above = sums[cut];
      beyond = lows[cut];
    }
    low = lows[cut];
    high = std::min(high, beyond);
  }
  scratch.items.clear();
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int32_t places[kBlock + kLanes];
    const int64_t found = kernels.collect(&values[begin], std::min<int64_t>(kBlock, count - begin), low, beyond,
                                          static_cast<int32_t>(begin), places);
    for (int64_t i = 0; i < found; ++i) scratch.items.push_back(Item{scratch.weights[places[i]], places[i]});
  }
  return edge_of_items(needed - above, margin);
}

// The item as the edge, of whose weight the nucleus needs `needed`. Where another may be the edge instead, the nucleus
// gains or loses no more than margin and the item's weight, for those beyond it weigh no more than it does.
Sampler::Item Sampler::Task::edge_at(const Item& item, double needed, double margin) {
  if (needed < margin || item.weight - needed < margin) loose = margin + item.weight;
  return item;
}

// Quickselect by mass.
Sampler::Item Sampler::Task::edge_of_items(double needed, double margin) {
  auto& items = scratch.items;
  auto begin = items.begin(), end = items.end();
  while (end - begin > kSortAtMost) {
    const auto middle = begin + (end - begin) / 2;
    if (before(*middle, *begin)) std::swap(*middle, *begin);
    if (before(*(end - 1), *middle)) std::swap(*(end - 1), *middle);
    if (before(*middle, *begin)) std::swap(*middle, *begin);
    const Item pivot = *middle;
    std::swap(*middle, *(end - 1));
    double mass = 0.0;
    auto split = begin;
    for (auto item = begin; item != end - 1; ++item) {  // without a branch, for none could be foretold
      const bool is_before = before(*item, pivot);
      const Item moved = *item;
      *item = *split;
      *split = moved;
      split += is_before;
      mass += is_before ? moved.weight : 0.0;
    }
    if (mass >= needed) {
      end = split;
    } else if (mass + pivot.weight >= needed) {
      return edge_at(pivot, needed - mass, margin);
    } else {
      needed -= mass + pivot.weight;
      std::swap(*split, *(end - 1));
      begin = split + 1;
    }
  }
  std::sort(begin, end, before);
  for (auto item = begin; item != end; ++item) {
    if (needed <= item->weight) return edge_at(*item, needed, margin);
    needed -= item->weight;
  }
  return edge_at(begin == end ? items.back() : *(end - 1), 0.0, margin);
}

}  // namespace maitred
