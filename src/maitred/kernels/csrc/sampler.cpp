#include "sampler.h"

#include <cmath>
#include <cstring>

#include "sampler_task.h"

namespace maitred {

const SamplerKernels& sampler_plain();
#if defined(__x86_64__)
const SamplerKernels& sampler_avx2();
const SamplerKernels& sampler_avx512();
#endif

const SamplerKernels& sampler_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512 || isa == Isa::amx) return sampler_avx512();
  if (isa == Isa::avx2) return sampler_avx2();
#endif
  (void)isa;  // NEON takes the plain path
  return sampler_plain();
}

namespace {

// Without a branch, for none could be foretold.
float choose(bool first, float a, float b) {
  uint32_t a_bits, b_bits;
  std::memcpy(&a_bits, &a, sizeof a);
  std::memcpy(&b_bits, &b, sizeof b);
  const uint32_t mask = 0U - static_cast<uint32_t>(first), bits = (a_bits & mask) | (b_bits & ~mask);
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

float largest_of(const float* groups, int64_t num_blocks) {
  float largest[kLanes];
  std::fill(largest, largest + kLanes, -kInfinity);
  for (int64_t block = 0; block < num_blocks; ++block, groups += kLanes)
    for (int lane = 0; lane < kLanes; ++lane)
      largest[lane] = groups[lane] > largest[lane] ? groups[lane] : largest[lane];
  return *std::max_element(largest, largest + kLanes);
}

}  // namespace

// The ten steps of executor/sampler.py.
void Sampler::Task::run(SampleRow& row) {
  logits = row.logits;
  row.token = 0;
  row.fault = SampleFault::none;
  int64_t best = find_best(row);
  if (row.fault != SampleFault::none) return;
  const bool wants_logprobs = row.num_top >= 0;
  const double log_total = wants_logprobs ? list_likeliest(row) : 0.0;
  if (row.changes != nullptr) {
    apply(*row.changes, wants_logprobs);
    best = find_best(row);
    if (row.fault == SampleFault::nothing) row.fault = SampleFault::nothing_allowed;
    if (row.fault != SampleFault::none) return;
  }
  row.token = static_cast<int32_t>(row.temperature == 0.0 ? best : draw(row));
  if (!wants_logprobs) return;
  if (row.changes != nullptr) restore(*row.changes);
  rank_token(row, log_total);
}

// Scans, and gives the first id of the largest logit; sets the fault of a row that nothing can be drawn from.
int64_t Sampler::Task::find_best(SampleRow& row) {
  const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
  scratch.groups.resize(num_blocks * kLanes);
  if (kernels.scan(logits, vocab_size, scratch.groups.data())) {
    row.fault = SampleFault::nan;
    return 0;
  }
  largest = largest_of(scratch.groups.data(), num_blocks);
  if (std::isinf(largest)) {
    row.fault = largest > 0.0F ? SampleFault::infinite : SampleFault::nothing;
    return 0;
  }
  const auto first = std::find(scratch.groups.begin(), scratch.groups.end(), largest);
  const int64_t begin = (first - scratch.groups.begin()) / kLanes * kBlock;
  return std::find(logits + begin, logits + vocab_size, largest) - logits;
}

// With `undoes`, what restore() needs is kept.
void Sampler::Task::apply(const LogitChanges& c, bool undoes) {
  auto& undo = scratch.undo;
  undo.clear();
  if (c.only_allowed) {
    if (undoes) scratch.raw.assign(logits, logits + vocab_size);
    auto& kept = scratch.values;
    kept.resize(c.num_allowed);
    for (int64_t i = 0; i < c.num_allowed; ++i) kept[i] = logits[c.allowed_ids[i]];
    std::fill(logits, logits + vocab_size, -kInfinity);
    for (int64_t i = 0; i < c.num_allowed; ++i) logits[c.allowed_ids[i]] = kept[i];
  }
  const auto note = [&](const int64_t* ids, int64_t count) {
    if (!undoes || c.only_allowed) return;
    for (int64_t i = 0; i < count; ++i) undo.push_back(LogitBefore{ids[i], logits[ids[i]]});
  };
  note(c.banned_ids, c.num_banned);
  for (int64_t i = 0; i < c.num_banned; ++i) logits[c.banned_ids[i]] = -kInfinity;
  note(c.bias_ids, c.num_bias);
  for (int64_t i = 0; i < c.num_bias; ++i) logits[c.bias_ids[i]] += c.bias[i];
  note(c.known_ids, c.num_known);
  for (int64_t i = 0; i < c.num_known; ++i) {
    float& logit = logits[c.known_ids[i]];
    logit = choose(logit < 0.0F, logit * c.repetition, logit / c.repetition);
  }
  note(c.output_ids, c.num_output);
  for (int64_t i = 0; i < c.num_output; ++i) {
    float& logit = logits[c.output_ids[i]];
    logit -= c.frequency * c.output_counts[i];
    logit -= c.presence;
  }
}

// The row before apply().
void Sampler::Task::restore(const LogitChanges& c) {
  if (c.only_allowed)
    logits = scratch.raw.data();
  else
    std::for_each(scratch.undo.rbegin(), scratch.undo.rend(),
                  [&](const LogitBefore& was) { logits[was.id] = was.logit; });
}

// Fills top_ids and their logprobs; the log of the sum of all exp(logit).
double Sampler::Task::list_likeliest(SampleRow& row) {
  sharpness = 1.0;
  weigh_all(lowest_weighing());
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

void Sampler::Task::rank_token(SampleRow& row, double log_total) {
  const float chosen = logits[row.token], below = std::nextafter(chosen, -kInfinity);
  const int64_t equal_before =
      kernels.count_above(logits, row.token, below) - kernels.count_above(logits, row.token, chosen);
  row.logprobs[0] = static_cast<double>(chosen) - log_total;
  *row.rank = 1 + kernels.count_above(logits, vocab_size, chosen) + equal_before;
}

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
