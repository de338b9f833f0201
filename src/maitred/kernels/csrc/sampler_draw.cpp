// The draw: which tokens are candidates, what they weigh, and the first, ids ascending, at which the weights so far
// exceed `share` of all.
#include <cmath>

#include "sampler_exp.h"
#include "sampler_task.h"

namespace maitred {

namespace {

constexpr double kLowestWeight = 8.9e-308;
// What sums in double precision may err by, of all weight, and more.
constexpr double kRounding = 1e-12;

}  // namespace

int64_t Sampler::Task::draw(const SampleRow& row) {
  sharpness = std::min(1.0 / row.temperature, 1e300);
  is_in_doubt = false;
  error = can_be_rough() ? kRoughError : 0.0;
  int64_t id = draw_by_sums(row);
  error = 0.0;
  if (is_in_doubt) id = draw_by_sums(row);
  return id;
}

bool Sampler::Task::can_be_rough() const {
  if (kernels.weigh_roughly == nullptr || sharpness > kRoughRange || sharpness < 1.0 / kRoughRange) return false;
  return std::abs(static_cast<double>(largest)) * sharpness * k8Log2e < kRoughRange;
}

// How far share * beyond may be from (1 - share) * below, of which each sums up weights of the row.
double Sampler::Task::margin_of(double share, double below, double beyond) const {
  if (error == 0.0) return 0.0;
  return error * (share * beyond + (1.0 - share) * below + removed) + kRounding * (below + beyond);
}

int64_t Sampler::Task::draw_by_sums(const SampleRow& row) {
  removed = loose = 0.0;
  floor = lowest_weighing();
  if (row.min_p > 0.0) floor = std::max(floor, lowest_of_weight(row.min_p));
  if (row.top_k > 0 && row.top_k < vocab_size) {
    collect_top(row.top_k);
    keep_if([&](int64_t i) { return scratch.values[i] >= floor; });
    return draw_from_list(row);
  }
  if (row.min_p > 0.0 && !most_groups_reach(floor)) {
    collect(floor, kInfinity);
    weigh_list();
    return draw_from_list(row);
  }
  if (row.top_p < 1.0) return draw_nucleus(row);
  weigh_all(floor);
  return draw_from_blocks(row.share, Edge{floor, vocab_size - 1});
}

int64_t Sampler::Task::draw_from_list(const SampleRow& row) {
  return draw_from_list(row, row.top_p < 1.0 ? row.top_p * list_mass() : kInfinity, 0.0);
}

// Of the nucleus of mass `needed`, which may be wrong by `margin`.
int64_t Sampler::Task::draw_from_list(const SampleRow& row, double needed, double margin) {
  if (needed < kInfinity) {
    const auto ends = std::minmax_element(scratch.values.begin(), scratch.values.end());
    const Item last = edge_item(needed, margin, *ends.first, *ends.second);
    keep_if([&](int64_t i) { return !before(last, Item{scratch.weights[i], i}); });
  }
  const int64_t count = static_cast<int64_t>(scratch.weights.size());
  auto& sums = scratch.block_sums;
  sums.clear();
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    double sum = 0.0;
    for (int64_t i = begin; i < std::min<int64_t>(begin + kBlock, count); ++i) sum += scratch.weights[i];
    sums.push_back(sum);
  }
  double target, unused;
  const int64_t begin = find_block(row.share, &target, &unused) * kBlock;
  return scratch.ids[begin + first_over(begin, std::min<int64_t>(kBlock, count - begin), target, loose)];
}

// Of the weights from begin on the first at which their sum exceeds target, or the last that is not 0.
int64_t Sampler::Task::first_over(int64_t begin, int64_t count, double target, double margin) {
  const double* weights = &scratch.weights[begin];
  double below = 0.0, sum = 0.0;
  int64_t last = 0;
  for (int64_t i = 0; i < count && sum <= target; ++i) {
    if (weights[i] <= 0.0) continue;
    last = i;
    below = sum;
    sum += weights[i];
  }
  is_in_doubt |= target - below < margin || sum - target < margin;
  return last;
}

int64_t Sampler::Task::draw_from_blocks(double share, const Edge& edge) {
  double target, margin;
  const int64_t begin = find_block(share, &target, &margin) * kBlock;
  block_weights(begin, edge);
  return begin + first_over(0, static_cast<int64_t>(scratch.weights.size()), target, margin);
}

// The block in which share of all block_sums is passed; *target is how far into it, give or take *margin.
int64_t Sampler::Task::find_block(double share, double* target, double* margin) {
  const auto& sums = scratch.block_sums;
  const double total = sum_of(sums), wanted = share * total;
  double below = 0.0;
  size_t block = 0;
  for (; block + 1 < sums.size() && !(below + sums[block] > wanted); ++block) below += sums[block];
  *target = wanted - below;
  *margin = margin_of(share, below, total - below) + loose;
  return static_cast<int64_t>(block);
}

// The lowest logit whose weight does not count as 0.
float Sampler::Task::lowest_weighing() const { return lowest_of_weight(kLowestWeight); }

// Whether so many logits reach `low` that they fill nearly all groups.
bool Sampler::Task::most_groups_reach(float low) const {
  const int64_t count = static_cast<int64_t>(scratch.groups.size());
  return kernels.count_above(scratch.groups.data(), count, std::nextafter(low, -kInfinity)) > count / 50 * 49;
}

void Sampler::Task::weigh_all(float low) {
  scratch.block_sums.resize((vocab_size + kBlock - 1) / kBlock);
  double* sums = scratch.block_sums.data();
  if (error > 0.0)
    kernels.weigh_roughly(logits, vocab_size, &low, largest, sharpness, next, sums);
  else
    kernels.weigh(logits, vocab_size, &low, largest, sharpness, sums);
}

// scratch.weights of the block that begins at `begin`, 0 where they lie beyond the edge.
void Sampler::Task::block_weights(int64_t begin, const Edge& edge) {
  const int64_t count = std::min<int64_t>(kBlock, vocab_size - begin);
  scratch.weights.resize(count);
  kernels.weights(logits + begin, count, largest, sharpness, scratch.weights.data());
  for (int64_t i = 0; i < count; ++i) {
    const float logit = logits[begin + i];
    if (!(logit > edge.logit || (logit == edge.logit && begin + i <= edge.last_id))) scratch.weights[i] = 0.0;
  }
}

// A logit that at least `count` reach (count > 0), and not many more where count is small; -inf if unknown.
float Sampler::Task::largest_at_least(int64_t count) {
  auto& folded = scratch.folded;
  folded = scratch.groups;
  if (count > static_cast<int64_t>(folded.size())) return -kInfinity;
  while (static_cast<int64_t>(folded.size()) / 2 >= 4 * count) {
    const size_t half = folded.size() / 2;
    for (size_t i = 0; i < half; ++i) folded[i] = std::max(folded[i], folded[half + i]);
    if (folded.size() % 2 == 1) folded[0] = std::max(folded[0], folded.back());
    folded.resize(half);
  }
  std::nth_element(folded.begin(), folded.begin() + (count - 1), folded.end(), std::greater<float>());
  return folded[count - 1];
}

// The lowest logit whose weight is `weight` or more.
float Sampler::Task::lowest_of_weight(double weight) const {
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

// ids of low <= logit < high
void Sampler::Task::collect(float low, float high) {
  list_blocks(low, scratch.ids, [&](int64_t begin, int64_t count, int32_t* found) {
    return kernels.collect(logits + begin, count, low, high, static_cast<int32_t>(begin), found);
  });
}

// The list of the k largest logits.
void Sampler::Task::collect_top(int64_t k) {
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

void Sampler::Task::weigh_list() {
  scratch.values.resize(scratch.ids.size());
  for (size_t i = 0; i < scratch.ids.size(); ++i) scratch.values[i] = logits[scratch.ids[i]];
  weigh_values();
}

void Sampler::Task::weigh_values() {
  scratch.weights.resize(scratch.values.size());
  kernels.weights(scratch.values.data(), static_cast<int64_t>(scratch.values.size()), largest, sharpness,
                  scratch.weights.data());
}

void Sampler::Task::items_of_logits() {
  scratch.items.clear();
  for (int32_t id : scratch.ids) scratch.items.push_back(Item{logits[id], id});
}

}  // namespace maitred
