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

uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

}  // namespace

double uniform(uint64_t seed, uint64_t sample_index, uint64_t position) {
  constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15U;
  uint64_t state = mix64(seed + kGoldenGamma);
  state = mix64((state ^ sample_index) + kGoldenGamma);
  state = mix64((state ^ position) + kGoldenGamma);
  return static_cast<double>(state >> 11) * 0x1.0p-53;
}

// The ten steps of executor/sampler.py.
void Sampler::Task::run(SampleRow& row) {
  logits = row.logits;
  row.token = 0;
  row.fault = SampleFault::none;
  if (row.changes != nullptr && !is_inside(*row.changes)) {
    row.fault = SampleFault::outside;
    return;
  }
  const bool wants_logprobs = row.num_top >= 0, has_changes = row.changes != nullptr;
  // A row is scanned once, as changed, unless its raw logits are wanted or lost.
  const bool scans_raw = !has_changes || wants_logprobs || row.changes->covers();
  int64_t best = 0;
  double log_total = 0.0;
  if (scans_raw) {
    best = find_best(row);
    if (row.fault != SampleFault::none) return;
    if (wants_logprobs) log_total = list_likeliest(row);
  }
  if (has_changes) {
    const Before before = apply(*row.changes, wants_logprobs);
    best = find_best(row);
    if (row.fault == SampleFault::nothing && (scans_raw || before.can_be_drawn))
      row.fault = SampleFault::nothing_allowed;
    if (before.is_infinite && row.fault != SampleFault::nan) row.fault = SampleFault::infinite;
    if (before.is_nan) row.fault = SampleFault::nan;
    if (row.fault != SampleFault::none) return;
  }
  row.token = static_cast<int32_t>(row.temperature == 0.0 ? best : draw(row));
  if (!wants_logprobs) return;
  if (has_changes) restore(*row.changes);
  rank_token(row, log_total);
}

// Scans, and gives the first id of the largest logit; sets the fault of a row that nothing can be drawn from.
int64_t Sampler::Task::find_best(SampleRow& row) {
  const int64_t num_blocks = (vocab_size + kScanBlock - 1) / kScanBlock;
  scratch.groups.resize(num_blocks * kLanes);
  scratch.tops.resize(num_blocks);
  if (kernels.scan(logits, vocab_size, next, scratch.groups.data(), scratch.tops.data())) {
    row.fault = SampleFault::nan;
    return 0;
  }
  largest = *std::max_element(scratch.tops.begin(), scratch.tops.end());
  if (std::isinf(largest)) {
    row.fault = largest > 0.0F ? SampleFault::infinite : SampleFault::nothing;
    return 0;
  }
  const int64_t block = std::find(scratch.tops.begin(), scratch.tops.end(), largest) - scratch.tops.begin();
  return std::find(logits + block * kScanBlock, logits + vocab_size, largest) - logits;
}

// Whether all ids are in the vocabulary. Asked here, for here the ids are about to be needed.
bool Sampler::Task::is_inside(const LogitChanges& c) const {
  int64_t signs = 0;  // below 0 once an id or its distance to the last one is
  const auto look_at = [&](const int64_t* ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i) signs |= ids[i] | (vocab_size - 1 - ids[i]);
  };
  look_at(c.allowed_ids, c.num_allowed);
  look_at(c.banned_ids, c.num_banned);
  look_at(c.bias_ids, c.num_bias);
  look_at(c.known_ids, c.num_known);
  look_at(c.output_ids, c.num_output);
  return signs >= 0;
}

// With `undoes`, what restore() needs is kept.
Sampler::Before Sampler::Task::apply(const LogitChanges& c, bool undoes) {
  auto& undo = scratch.undo;
  undo.clear();
  Before before;
  if (undoes && c.covers()) scratch.raw.assign(logits, logits + vocab_size);
  if (c.mask != nullptr) kernels.mask(logits, vocab_size, c.mask);
  if (c.only_allowed) {
    auto& kept = scratch.values;
    kept.resize(c.num_allowed);
    for (int64_t i = 0; i < c.num_allowed; ++i) kept[i] = logits[c.allowed_ids[i]];
    std::fill(logits, logits + vocab_size, -kInfinity);
    for (int64_t i = 0; i < c.num_allowed; ++i) logits[c.allowed_ids[i]] = kept[i];
  }
  const auto change_each = [&](const int64_t* ids, int64_t count, auto change) {
    for (int64_t i = 0; undoes && !c.covers() && i < count; ++i) undo.push_back(LogitBefore{ids[i], logits[ids[i]]});
    for (int64_t i = 0; i < count; ++i) {
      float& logit = logits[ids[i]];
      before.can_be_drawn |= logit > -kInfinity;
      logit = change(logit, i);
    }
  };
  for (int64_t i = 0; i < c.num_banned; ++i) {  // the only change that hides a NaN or +inf
    const float logit = logits[c.banned_ids[i]];
    before.is_nan |= std::isnan(logit);
    before.is_infinite |= logit == kInfinity;
  }
  change_each(c.banned_ids, c.num_banned, [&](float, int64_t) { return -kInfinity; });
  change_each(c.bias_ids, c.num_bias, [&](float logit, int64_t i) { return logit + c.bias[i]; });
  change_each(c.known_ids, c.num_known,
              [&](float logit, int64_t) { return choose(logit < 0.0F, logit * c.repetition, logit / c.repetition); });
  change_each(c.output_ids, c.num_output,
              [&](float logit, int64_t i) { return logit - c.frequency * c.output_counts[i] - c.presence; });
  return before;
}

// The row before apply().
void Sampler::Task::restore(const LogitChanges& c) {
  if (c.covers())
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
    for (int row = counter.take(); row < num_rows; row = counter.take()) {
      const int next = row + pool_.num_threads();
      task.next = rows[next < num_rows ? next : row].logits;
      task.run(rows[row]);
    }
  };
  if (num_rows == 1)
    body(Worker{0, 1, nullptr});  // waking the others would take longer
  else
    pool_.run(body);
}

}  // namespace maitred
