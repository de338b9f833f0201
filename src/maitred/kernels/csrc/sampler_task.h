// One row on its way to a token, in one thread's hands. A list of candidates is scratch.ids, ascending, with their
// logits (values) and weights beside them.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include "sampler.h"

namespace maitred {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Sampler::Task {
  const SamplerKernels& kernels;
  Scratch& scratch;
  const int64_t vocab_size;
  const float* next = nullptr;  // the row after this one, to be fetched by and by
  float* logits = nullptr;
  float largest = 0.0F;
  double sharpness = 1.0;
  float floor = -kInfinity;  // of what may be drawn
  // Of sums over the row: by what share of itself each may be wrong, the weight since taken out of them, and the weight
  // of which it is not known whether it is in the nucleus.
  double error = 0.0;
  double removed = 0.0;
  double loose = 0.0;
  bool is_in_doubt = false;  // a token's edge was nearer than all that may be wrong

  // --- sampler.cpp ---
  void run(SampleRow& row);  // the ten steps of executor/sampler.py
  int64_t find_best(SampleRow& row);
  bool is_inside(const LogitChanges& changes) const;
  Before apply(const LogitChanges& changes, bool undoes);
  void restore(const LogitChanges& changes);
  double list_likeliest(SampleRow& row);
  void rank_token(SampleRow& row, double log_total);

  // --- sampler_draw.cpp ---
  int64_t draw(const SampleRow& row);
  int64_t draw_by_sums(const SampleRow& row);
  bool can_be_rough() const;
  double margin_of(double share, double below, double beyond) const;
  int64_t draw_from_list(const SampleRow& row);
  int64_t draw_from_list(const SampleRow& row, double needed, double margin);
  int64_t first_over(int64_t begin, int64_t count, double target, double margin);
  int64_t draw_from_blocks(double share, const Edge& edge);
  void block_weights(int64_t begin, const Edge& edge);
  int64_t find_block(double share, double* target, double* margin);
  void weigh_all(float low);
  float lowest_weighing() const;
  float lowest_of_weight(double weight) const;
  bool most_groups_reach(float low) const;
  float largest_at_least(int64_t count);
  void collect(float low, float high);
  void collect_top(int64_t k);
  void weigh_list();
  void weigh_values();
  void items_of_logits();

  // --- sampler_nucleus.cpp ---
  int64_t draw_nucleus(const SampleRow& row);
  float about_few() const;
  Buckets buckets_below(float listed);
  int likely_bucket(const Buckets& below, double top_p, double listed_mass) const;
  Edge edge_near(const Buckets& buckets, int bucket, double top_p);
  void weigh_two(std::array<float, 2> lows);
  void list_between(float low, float high);
  int64_t id_of_listed(int64_t index, float low, float high) const;
  void add_to_blocks(const Item& last, bool adds);
  Item edge_item(double needed, double margin, float low, float high);
  double list_mass() const;
  Item edge_of_items(double needed, double margin);
  Item edge_at(const Item& item, double needed, double margin);

  static bool before(const Item& a, const Item& b) {
    return (a.weight > b.weight) | ((a.weight == b.weight) & (a.id < b.id));
  }

  // Lists what find(begin, count, found) writes to `found` and counts, of each block in turn; parts of blocks whose
  // largest is below `low` are not looked at.
  template <typename T, typename Find>
  void list_blocks(float low, std::vector<T>& list, Find find) {
    T found[kBlock + kLanes];
    list.clear();
    scratch.starts.clear();
    for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
      scratch.starts.push_back(static_cast<int64_t>(list.size()));
      const int64_t block_end = std::min(begin + kBlock, vocab_size);
      for (int64_t first = begin; first < block_end;) {
        int64_t end = first;
        while (end < block_end && scratch.tops[end / kScanBlock] >= low) end += kScanBlock;
        const int64_t count = end == first ? 0 : find(first, std::min(end, block_end) - first, found);
        list.insert(list.end(), found, found + count);
        first = end + kScanBlock;  // the one at the end does not reach
      }
    }
    scratch.starts.push_back(static_cast<int64_t>(list.size()));
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
};

inline double sum_of(const double* values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

inline double sum_of(const std::vector<double>& values) { return sum_of(values.data(), values.size()); }

}  // namespace maitred
