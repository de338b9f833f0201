// Top-p: the smallest set of likeliest tokens that has the wanted mass, without sorting and in one pass over the row.
// A sample says between which logits the edge lies; the pass adds up all weights and those from the middle on, so that
// only what lies to one side of the middle must be listed and put in order. Where the sample misled, more is listed.
#include <cmath>

#include "sampler_task.h"

namespace maitred {
namespace {

// A nucleus is first sought among about this many of the largest logits.
constexpr int64_t kFewCandidates = 128;
// The edge of a larger one is looked for this many standard deviations to either side of where a sample has it.
constexpr double kDeviations = 2.5;
// Below this a sort is cheaper than another partition.
constexpr int64_t kSortAtMost = 48;
// A list is searched by quarters.
constexpr int kNumCuts = 4;
constexpr int kNumBuckets = 256;
// The sample has one logit of so many: of a block's every 16th.
constexpr int kGroupSize = kBlock / kLanes;
// What lies this much below the largest, in natural logarithms, has no mass to speak of.
constexpr double kDeepest = 50.0;

// Even buckets of logits downwards from `top`.
struct Buckets {
  float top, per_logit;

  Buckets(float top, float bottom, double sharpness) : top(top) {
    const double span = std::min(static_cast<double>(top) - bottom, kDeepest / sharpness);
    per_logit = span > 0.0 ? static_cast<float>((kNumBuckets - 1) / span) : 0.0F;
  }
  int of(float logit) const {
    const float bucket = (top - logit) * per_logit;
    return static_cast<int>(bucket < kNumBuckets - 1 ? bucket : kNumBuckets - 1);
  }
  float end_of(int bucket) const { return top - static_cast<float>(bucket + 1) / per_logit; }
};

}  // namespace

int64_t Sampler::Task::draw_nucleus(const SampleRow& row) {
  const float listed = std::max(floor, about_largest(kFewCandidates));
  collect(listed, kInfinity);
  weigh_list();
  if (listed == floor) return draw_from_list(row);
  const double listed_mass = list_mass();
  const Place place = likely_place(row.top_p, listed, listed_mass);
  if (place.is_listed) {
    weigh_all(floor);
    const double total = sum_of(scratch.block_sums), needed = row.top_p * total;
    if (listed_mass >= needed) return draw_from_list(row, needed, margin_of(row.top_p, 0.0, total));
  }
  return draw_from_blocks(row.share, edge_near(place, row.top_p));
}

// A logit that about `count` reach; -inf where there are few more.
float Sampler::Task::about_largest(int64_t count) {
  constexpr int64_t kEach = 16;  // of so many groups one is asked
  auto& folded = scratch.folded;
  folded.clear();
  for (size_t i = 0; i < scratch.groups.size(); i += kEach) folded.push_back(scratch.groups[i]);
  if (count / kEach >= static_cast<int64_t>(folded.size())) return -kInfinity;
  const auto nth = folded.begin() + count / kEach;
  std::nth_element(folded.begin(), nth, folded.end(), std::greater<float>());
  return *nth;
}

// Where the edge is likely to be.
//
// Logits from `listed` on are known to weigh listed_mass; of each group of all others one, taken by turns, speaks for
// the rest. For any cut, the mass from it on less top_p of all mass is then a sum with a variance, and 0 at the edge.
Sampler::Place Sampler::Task::likely_place(double top_p, float listed, double listed_mass) {
  sample_below(listed);
  const auto& values = scratch.folded;
  const auto& weights = scratch.cut_sums;
  float lowest = listed;
  for (float value : values) lowest = value < lowest && value > -kInfinity ? value : lowest;
  const Buckets buckets(listed, lowest, sharpness);
  double mass[kNumBuckets] = {}, squares[kNumBuckets] = {};
  for (size_t i = 0; i < values.size(); ++i) {
    const int bucket = buckets.of(values[i]);
    mass[bucket] += weights[i];
    squares[bucket] += weights[i] * weights[i];
  }
  const double spoken_for = kGroupSize, rest_p = 1.0 - top_p;
  double above = 0.0, squares_above = 0.0;
  double below = sum_of(mass, kNumBuckets), squares_below = sum_of(squares, kNumBuckets);
  // By how many standard deviations the cut is below the edge.
  const auto deviations = [&] {
    const double excess = rest_p * listed_mass + spoken_for * (rest_p * above - top_p * below);
    const double variance = rest_p * rest_p * squares_above + top_p * top_p * std::max(squares_below, 0.0);
    return excess / (spoken_for * std::sqrt(variance) + std::numeric_limits<double>::min());
  };
  double reached = deviations();
  Place place{floor, reached > 0.0 ? listed : floor, listed, reached > kDeviations};
  for (int bucket = 0; bucket < kNumBuckets - 1 && reached < kDeviations; ++bucket) {
    above += mass[bucket];
    below -= mass[bucket];
    squares_above += squares[bucket];
    squares_below -= squares[bucket];
    const double before = reached;
    reached = deviations();
    const float end = std::max(floor, buckets.end_of(bucket));
    if (reached <= -kDeviations) place.high = end;
    if (before <= 0.0 && reached > 0.0) place.middle = end;
    if (reached >= kDeviations) place.low = end;
  }
  return place;
}

// Fills scratch.folded with a logit of each kGroupSize and cut_sums with its weight: of -inf where the logit is
// `listed` or more, or below the floor. One more is as if `listed` had been found: a sample may miss the heaviest.
void Sampler::Task::sample_below(float listed) {
  constexpr uint32_t kStride = 29;  // any odd number: groups take turns
  const int64_t num_groups = (vocab_size + kBlock - 1) / kBlock * kLanes;
  auto& values = scratch.folded;
  values.resize(num_groups + 1);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t turn = static_cast<uint32_t>(group) * kStride % kGroupSize;
    const int64_t id = group / kLanes * kBlock + group % kLanes + turn * kLanes;
    const float value = logits[std::min(id, vocab_size - 1)];
    values[group] = (value >= floor) & (value < listed) ? value : -kInfinity;
  }
  values[num_groups] = listed;
  scratch.cut_sums.resize(num_groups + 1);
  kernels.weights(values.data(), num_groups + 1, largest, sharpness, scratch.cut_sums.data());
}

// The edge of the nucleus; block_sums become those of the nucleus.
Sampler::Edge Sampler::Task::edge_near(const Place& place, double top_p) {
  const size_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
  auto& sums = scratch.cut_sums;
  weigh_two({floor, place.middle});
  const double total = sum_of(sums.data(), num_blocks), needed = top_p * total;
  const double from_middle = sum_of(&sums[num_blocks], num_blocks);
  scratch.block_sums.assign(&sums[num_blocks], &sums[num_blocks] + num_blocks);
  const bool is_below = from_middle < needed;
  float low = is_below ? place.low : place.middle, high = is_below ? place.middle : place.high;
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
  // From below the middle the nucleus has what is up to the edge, from above it lacks what is beyond.
  if (!is_below) removed = listed;
  const bool has_largest = high == kInfinity;  // then nothing is above the list
  const double above = has_largest ? 0.0 : is_below ? from_middle : from_middle - listed;
  const double margin = has_largest ? margin_of(top_p, 0.0, total) : margin_of(top_p, from_middle, total - from_middle);
  const Item last = edge_item(needed - above, margin, low, std::min(high, largest));
  add_to_blocks(last, is_below);
  return Edge{logits[last.id], last.id};
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

void Sampler::Task::list_between(float low, float high) {
  collect(low, high);
  weigh_list();
}

double Sampler::Task::list_mass() const {
  const float lows[2] = {-kInfinity, kInfinity};
  double sums[2];
  kernels.add_from_two(scratch.values.data(), scratch.weights.data(), static_cast<int64_t>(scratch.ids.size()), lows,
                       sums);
  return sums[0];
}

// Adds to block_sums what the list has up to `last`, or takes from it what the list has beyond.
void Sampler::Task::add_to_blocks(const Item& last, bool adds) {
  auto& values = scratch.values;
  const float edge = logits[last.id], lows[2] = {-kInfinity, edge};
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] == edge && scratch.ids[i] > last.id) values[i] = -kInfinity;
  for (size_t block = 0; block < scratch.block_sums.size(); ++block) {
    const size_t begin = scratch.starts[block], end = scratch.starts[block + 1];
    if (begin == end) continue;
    double sums[2];
    kernels.add_from_two(&values[begin], &scratch.weights[begin], static_cast<int64_t>(end - begin), lows, sums);
    double& sum = scratch.block_sums[block];
    sum = std::max(0.0, sum + (adds ? sums[1] : sums[1] - sums[0]));
  }
}

// The item at which the list's weights, largest first, reach `needed`, which may be wrong by `margin`; all of its
// logits are from `low` to `high`.
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
    for (int64_t i = 0; i < found; ++i)
      scratch.items.push_back(Item{scratch.weights[places[i]], scratch.ids[places[i]]});
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
