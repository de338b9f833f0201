#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace maitred {

const SamplerKernels& sampler_plain();
#if defined(__x86_64__)
const SamplerKernels& sampler_avx2();
const SamplerKernels& sampler_avx512();
#endif

const SamplerKernels& sampler_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return sampler_avx512();
  if (isa == Isa::avx2) return sampler_avx2();
#endif
  (void)isa;  // NEON takes the plain path
  return sampler_plain();
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A nucleus is first sought among this many of the largest logits, then among so many more.
constexpr int64_t kFewCandidates = 128, kManyCandidates = 768;
// Where it is larger, this many values, evenly spread, tell about where its edge must be.
constexpr int64_t kSampleSize = 2048;
// Below this a sort is cheaper than another partition.
constexpr int64_t kSortAtMost = 48;
constexpr int kNumBuckets = 256;

double sum_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (double value : values) sum += value;
  return sum;
}

void apply(const LogitChanges& c, float* logits, int64_t vocab_size, std::vector<float>& kept) {
  if (c.only_allowed) {
    kept.resize(c.num_allowed);
    for (int64_t i = 0; i < c.num_allowed; ++i) kept[i] = logits[c.allowed_ids[i]];
    std::fill(logits, logits + vocab_size, -kInfinity);
    for (int64_t i = 0; i < c.num_allowed; ++i) logits[c.allowed_ids[i]] = kept[i];
  }
  for (int64_t i = 0; i < c.num_banned; ++i) logits[c.banned_ids[i]] = -kInfinity;
  for (int64_t i = 0; i < c.num_bias; ++i) logits[c.bias_ids[i]] += c.bias[i];
  for (int64_t i = 0; i < c.num_known; ++i) {
    float& logit = logits[c.known_ids[i]];
    logit = logit < 0.0F ? logit * c.repetition : logit / c.repetition;
  }
  for (int64_t i = 0; i < c.num_output; ++i) {
    float& logit = logits[c.output_ids[i]];
    logit -= c.frequency * c.output_counts[i];
    logit -= c.presence;
  }
}

}  // namespace

// A list of candidates is scratch.ids, ascending, with their logits (values) and weights beside them.
struct Sampler::Task {
  const SamplerKernels& kernels;
  Scratch& scratch;
  const int64_t vocab_size;
  float* logits = nullptr;
  float largest = 0.0F;
  double sharpness = 1.0;
  float floor = -kInfinity;  // of what may be drawn

  // The ten steps of executor/sampler.py.
  void run(SampleRow& row) {
    logits = row.logits;
    row.token = 0;
    row.fault = SampleFault::none;
    int64_t best = find_best(row);
    if (row.fault != SampleFault::none) return;
    const float* raw = logits;
    double log_total = 0.0;
    if (row.num_top >= 0) {
      log_total = list_likeliest(row);
      if (row.changes != nullptr) {
        scratch.raw.assign(logits, logits + vocab_size);
        raw = scratch.raw.data();
      }
    }
    if (row.changes != nullptr) {
      apply(*row.changes, logits, vocab_size, scratch.values);
      best = find_best(row);
      if (row.fault == SampleFault::nothing) row.fault = SampleFault::nothing_allowed;
      if (row.fault != SampleFault::none) return;
    }
    row.token = static_cast<int32_t>(row.temperature == 0.0 ? best : draw(row));
    if (row.num_top >= 0) rank_token(row, raw, log_total);
  }

  // Scans, and gives the first id of the largest logit; sets the fault of a row that nothing can be drawn from.
  int64_t find_best(SampleRow& row) {
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    scratch.groups.resize(num_blocks * kLanes);
    if (kernels.scan(logits, vocab_size, scratch.groups.data())) {
      row.fault = SampleFault::nan;
      return 0;
    }
    const auto first = std::max_element(scratch.groups.begin(), scratch.groups.end());
    largest = *first;
    if (std::isinf(largest)) {
      row.fault = largest > 0.0F ? SampleFault::infinite : SampleFault::nothing;
      return 0;
    }
    const int64_t begin = (first - scratch.groups.begin()) / kLanes * kBlock;
    return std::find(logits + begin, logits + vocab_size, largest) - logits;
  }

  // --- logprobs ---

  // Fills top_ids and their logprobs; the log of the sum of all exp(logit).
  double list_likeliest(SampleRow& row) {
    sharpness = 1.0;
    weigh_all(-kInfinity);
    const double log_total = static_cast<double>(largest) + std::log(sum_of(scratch.block_sums));
    const int64_t count = std::min<int64_t>(row.num_top, vocab_size);
    if (count == 0) return log_total;
    collect(largest_at_least(count), kInfinity);
    items_of_logits();
    const auto middle = scratch.items.begin() + count;
    std::partial_sort(scratch.items.begin(), middle, scratch.items.end(), before);
    for (int64_t i = 0; i < count; ++i) {
      row.top_ids[i] = static_cast<int32_t>(scratch.items[i].id);
      row.logprobs[1 + i] = scratch.items[i].weight - log_total;
    }
    return log_total;
  }

  void rank_token(SampleRow& row, const float* raw, double log_total) {
    const float chosen = raw[row.token], below = std::nextafter(chosen, -kInfinity);
    const int64_t equal_before =
        kernels.count_above(raw, row.token, below) - kernels.count_above(raw, row.token, chosen);
    row.logprobs[0] = static_cast<double>(chosen) - log_total;
    *row.rank = 1 + kernels.count_above(raw, vocab_size, chosen) + equal_before;
  }

  // --- drawing ---

  int64_t draw(const SampleRow& row) {
    sharpness = std::min(1.0 / row.temperature, 1e300);
    floor = row.min_p > 0.0 ? lowest_of_weight(row.min_p) : -kInfinity;
    if (row.top_k > 0 && row.top_k < vocab_size) {
      collect_top(row.top_k);
      keep_if([&](int64_t i) { return scratch.values[i] >= floor; });
      return draw_from_list(row);
    }
    if (floor > -kInfinity) {
      collect(floor, kInfinity);
      if (static_cast<int64_t>(scratch.ids.size()) <= vocab_size / 16) {
        weigh_list();
        return draw_from_list(row);
      }
    }
    weigh_all(floor);
    if (row.top_p < 1.0) return draw_nucleus(row);
    return draw_from_blocks(row.share, Edge{floor, vocab_size - 1});
  }

  // For block_sums of all logits from floor on.
  int64_t draw_nucleus(const SampleRow& row) {
    const double total = sum_of(scratch.block_sums), needed = row.top_p * total;
    float cut = kInfinity;  // logits from here on weigh above_cut
    double above_cut = 0.0;
    const int64_t most = static_cast<int64_t>(scratch.groups.size()) * 3 / 4;
    for (int64_t count : {std::min(kFewCandidates, most), std::min(kManyCandidates, most), most}) {
      // No weight is above 1, so a nucleus has at least `needed` tokens; and what is far from enough says the same.
      if (needed > static_cast<double>(count) || (above_cut > 0.0 && above_cut < 0.5 * needed)) break;
      cut = std::max(floor, largest_at_least(count));
      collect(cut, kInfinity);
      weigh_list();
      above_cut = sum_of(scratch.weights);
      if (above_cut >= needed || cut == floor) return draw_from_list(row, needed);
    }
    return draw_from_blocks(row.share, edge_of_wide_nucleus(needed, sampled_bracket(needed, total, cut, above_cut)));
  }

  // The edge of a nucleus too large to list; block_sums become those of the nucleus. Only the bracket is listed.
  Edge edge_of_wide_nucleus(double needed, Bracket bracket) {
    for (int attempt = 0;; ++attempt) {
      weigh_all(bracket.high);
      const double above = sum_of(scratch.block_sums);
      collect(bracket.low, bracket.high);
      weigh_list();
      const bool is_last = attempt == 2 || (bracket.low == floor && bracket.high == kInfinity);
      if (!is_last && above >= needed) {  // the sample misled us
        bracket = Bracket{bracket.high, kInfinity};
      } else if (!is_last && above + sum_of(scratch.weights) < needed) {
        bracket = Bracket{floor, bracket.low};
      } else if (scratch.ids.empty()) {
        bracket = Bracket{floor, kInfinity};
      } else {
        const Item last = edge_item(needed - above);
        for (size_t i = 0; i < scratch.ids.size(); ++i)
          if (!before(last, Item{scratch.weights[i], scratch.ids[i]}))
            scratch.block_sums[scratch.ids[i] / kBlock] += scratch.weights[i];
        return Edge{logits[last.id], last.id};
      }
    }
  }

  // Between which logits the edge lies: of evenly spread values from floor to `cut`, where the mass that is missing
  // above_cut is reached, a few standard deviations up and down.
  Bracket sampled_bracket(double needed, double total, float cut, double above_cut) {
    scratch.ids.clear();
    for (int64_t i = 0; i < kSampleSize; ++i) {
      const int64_t id = i * vocab_size / kSampleSize;
      if (logits[id] >= floor && logits[id] < cut) scratch.ids.push_back(static_cast<int32_t>(id));
    }
    Bracket bracket{floor, cut};
    if (scratch.ids.empty()) return bracket;
    weigh_list();
    const Item edge = edge_item((needed - above_cut) / (total - above_cut) * sum_of(scratch.weights));
    auto& values = scratch.values;
    const auto above = std::count_if(values.begin(), values.end(), [&](float v) { return v > logits[edge.id]; });
    const auto rank = static_cast<int64_t>(above), count = static_cast<int64_t>(values.size());
    const auto margin = static_cast<int64_t>(12 + 4.0 * std::sqrt(static_cast<double>(std::min(rank, count - rank))));
    if (rank + margin < count) bracket.low = nth_largest(values, rank + margin);
    if (rank > margin) bracket.high = nth_largest(values, rank - margin);
    return bracket;
  }

  static float nth_largest(std::vector<float>& values, int64_t n) {
    std::nth_element(values.begin(), values.begin() + n, values.end(), std::greater<float>());
    return values[n];
  }

  // --- candidates ---

  void weigh_all(float low) {
    scratch.block_sums.resize((vocab_size + kBlock - 1) / kBlock);
    kernels.weigh(logits, vocab_size, low, largest, sharpness, scratch.block_sums.data());
  }

  // scratch.weights of the block that begins at `begin`, 0 where they lie beyond the edge.
  void block_weights(int64_t begin, const Edge& edge) {
    const int64_t count = std::min<int64_t>(kBlock, vocab_size - begin);
    scratch.weights.resize(count);
    kernels.weights(logits + begin, count, largest, sharpness, scratch.weights.data());
    for (int64_t i = 0; i < count; ++i) {
      const float logit = logits[begin + i];
      if (!(logit > edge.logit || (logit == edge.logit && begin + i <= edge.last_id))) scratch.weights[i] = 0.0;
    }
  }

  // A logit that at least `count` reach (count > 0), and not many more where count is small; -inf if unknown.
  float largest_at_least(int64_t count) {
    auto& folded = scratch.folded;
    folded = scratch.groups;
    if (count > static_cast<int64_t>(folded.size())) return -kInfinity;
    while (static_cast<int64_t>(folded.size()) / 2 >= 4 * count) {
      const size_t half = folded.size() / 2;
      for (size_t i = 0; i < half; ++i) folded[i] = std::max(folded[i], folded[half + i]);
      if (folded.size() % 2 == 1) folded[0] = std::max(folded[0], folded.back());
      folded.resize(half);
    }
    return nth_largest(folded, count - 1);
  }

  // The lowest logit whose weight is `weight` or more.
  float lowest_of_weight(double weight) {
    const double distance = std::log(weight) / sharpness;
    const double low = static_cast<double>(largest) + distance + distance * 1e-9;
    float logit = static_cast<float>(std::max(low, -static_cast<double>(std::numeric_limits<float>::max())));
    logit = std::nextafter(logit, -kInfinity);
    for (; logit < largest; logit = std::nextafter(logit, kInfinity)) {
      double reached;
      kernels.weights(&logit, 1, largest, sharpness, &reached);
      if (reached >= weight) break;
    }
    return logit;
  }

  // ids of low <= logit < high; blocks whose largest is lower are not looked at.
  void collect(float low, float high) {
    scratch.ids.resize(vocab_size + kLanes);
    int64_t count = 0;
    for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
      const float* groups = &scratch.groups[begin / kBlock * kLanes];
      bool reaches = false;
      for (int lane = 0; lane < kLanes; ++lane) reaches |= groups[lane] >= low;
      if (!reaches) continue;
      count += kernels.collect(logits + begin, std::min<int64_t>(kBlock, vocab_size - begin), low, high,
                               static_cast<int32_t>(begin), scratch.ids.data() + count);
    }
    scratch.ids.resize(count);
  }

  // The list of the k largest logits.
  void collect_top(int64_t k) {
    collect(largest_at_least(k), kInfinity);
    if (static_cast<int64_t>(scratch.ids.size()) > k) {
      items_of_logits();
      std::nth_element(scratch.items.begin(), scratch.items.begin() + (k - 1), scratch.items.end(), before);
      const Item last = scratch.items[k - 1];
      const auto beyond = [&](int32_t id) { return before(last, Item{logits[id], id}); };
      scratch.ids.erase(std::remove_if(scratch.ids.begin(), scratch.ids.end(), beyond), scratch.ids.end());
    }
    weigh_list();
  }

  void weigh_list() {
    scratch.values.resize(scratch.ids.size());
    scratch.weights.resize(scratch.ids.size());
    for (size_t i = 0; i < scratch.ids.size(); ++i) scratch.values[i] = logits[scratch.ids[i]];
    kernels.weights(scratch.values.data(), static_cast<int64_t>(scratch.ids.size()), largest, sharpness,
                    scratch.weights.data());
  }

  template <typename Test>
  void keep_if(Test test) {
    size_t kept = 0;
    for (size_t i = 0; i < scratch.ids.size(); ++i) {
      if (!test(i)) continue;
      scratch.ids[kept] = scratch.ids[i];
      scratch.values[kept] = scratch.values[i];
      scratch.weights[kept++] = scratch.weights[i];
    }
    scratch.ids.resize(kept);
    scratch.values.resize(kept);
    scratch.weights.resize(kept);
  }

  static bool before(const Item& a, const Item& b) {
    return (a.weight > b.weight) | ((a.weight == b.weight) & (a.id < b.id));
  }

  void items_of_logits() {
    scratch.items.clear();
    for (int32_t id : scratch.ids) scratch.items.push_back(Item{logits[id], id});
  }

  // The item at which the list's weights, largest first, reach `needed`.
  Item edge_item(double needed) {
    needed -= items_near_edge(needed);
    return edge_of_items(needed);
  }

  // Fills scratch.items with those of the list that may be at the edge; the sum of those above them. Logits fall into
  // even buckets between the largest and the smallest (or one so low that what is below hardly weighs anything).
  double items_near_edge(double needed) {
    const auto& values = scratch.values;
    const auto ends = std::minmax_element(values.begin(), values.end());
    const float top = *ends.second;
    const double span = std::min(static_cast<double>(top) - *ends.first, 50.0 / sharpness);
    const float buckets_per_logit = span > 0.0 ? static_cast<float>((kNumBuckets - 1) / span) : 0.0F;
    scratch.buckets.resize(values.size());
    double mass[kNumBuckets] = {};
    for (size_t i = 0; i < values.size(); ++i) {
      const float bucket = (top - values[i]) * buckets_per_logit;
      scratch.buckets[i] = static_cast<uint8_t>(bucket < kNumBuckets - 1 ? bucket : kNumBuckets - 1);
      mass[scratch.buckets[i]] += scratch.weights[i];
    }
    double above = 0.0;
    int edge = 0, last = kNumBuckets - 1;
    while (last > 0 && mass[last] == 0.0) --last;
    for (; edge < last && above + mass[edge] < needed; ++edge) above += mass[edge];
    scratch.items.clear();
    for (size_t i = 0; i < values.size(); ++i)
      if (scratch.buckets[i] == edge) scratch.items.push_back(Item{scratch.weights[i], scratch.ids[i]});
    return above;
  }

  // Quickselect by mass.
  Item edge_of_items(double needed) {
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
        return pivot;
      } else {
        needed -= mass + pivot.weight;
        std::swap(*split, *(end - 1));
        begin = split + 1;
      }
    }
    if (begin == end) return items.back();
    std::sort(begin, end, before);
    for (auto item = begin; item != end; ++item) {
      needed -= item->weight;
      if (needed <= 0.0) return *item;
    }
    return *(end - 1);
  }

  // --- the draw: the first candidate, ids ascending, at which the weights so far exceed `share` of all ---

  int64_t draw_from_list(const SampleRow& row) {
    return draw_from_list(row, row.top_p < 1.0 ? row.top_p * sum_of(scratch.weights) : kInfinity);
  }

  // Of the nucleus of mass `needed`.
  int64_t draw_from_list(const SampleRow& row, double needed) {
    if (needed < kInfinity) {
      const Item last = edge_item(needed);
      keep_if([&](int64_t i) { return !before(last, Item{scratch.weights[i], scratch.ids[i]}); });
    }
    const int64_t count = static_cast<int64_t>(scratch.weights.size());
    auto& sums = scratch.block_sums;
    sums.clear();
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      double sum = 0.0;
      for (int64_t i = begin; i < std::min<int64_t>(begin + kBlock, count); ++i) sum += scratch.weights[i];
      sums.push_back(sum);
    }
    double target;
    const int64_t begin = find_block(row.share, &target) * kBlock;
    return scratch.ids[begin + first_over(&scratch.weights[begin], std::min<int64_t>(kBlock, count - begin), target)];
  }

  int64_t draw_from_blocks(double share, const Edge& edge) {
    double target;
    const int64_t begin = find_block(share, &target) * kBlock;
    block_weights(begin, edge);
    return begin + first_over(scratch.weights.data(), static_cast<int64_t>(scratch.weights.size()), target);
  }

  // The block in which share of all block_sums is passed; *target is how far into it.
  int64_t find_block(double share, double* target) {
    const auto& sums = scratch.block_sums;
    const double wanted = share * sum_of(sums);
    double below = 0.0;
    size_t block = 0;
    for (; block + 1 < sums.size() && !(below + sums[block] > wanted); ++block) below += sums[block];
    *target = wanted - below;
    return static_cast<int64_t>(block);
  }

  // The first of the weights at which their sum exceeds target, or the last that is not 0.
  static int64_t first_over(const double* weights, int64_t count, double target) {
    double sum = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] <= 0.0) continue;
      last = i;
      sum += weights[i];
      if (sum > target) break;
    }
    return last;
  }
};

Sampler::Sampler(ThreadPool& pool, Isa isa) : pool_(pool), kernels_(sampler_kernels(isa)) {
  scratch_.resize(pool.num_threads());
}

void Sampler::sample(SampleRow* rows, int num_rows, int64_t vocab_size) {
  WorkCounter counter;
  const auto body = [&](const Worker& worker) {
    Task task{kernels_, scratch_[worker.index], vocab_size};
    for (int row = counter.take(); row < num_rows; row = counter.take()) task.run(rows[row]);
  };
  if (num_rows == 1)
    body(Worker{0, 1, nullptr});  // waking the others would take longer
  else
    pool_.run(body);
}

}  // namespace maitred
