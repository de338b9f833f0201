// From rows of logits to tokens: the steps and answers of executor/sampler.py, which is this file's oracle.
//
// A row is one thread's work from end to end, so neither its neighbours nor the number of threads can change it. Sums
// run in one order on every instruction set (blocks of kBlock values, eight lanes in a block), and exponentials are the
// same polynomial, so a row's token does not depend on the instruction set either. Where sums in single precision leave
// no doubt about the token they are enough; a row they leave in doubt is drawn again in double precision. Against
// numpy, whose sums run in another order, a draw can differ only where the random number falls within rounding (1e-14)
// of an edge.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"
#include "thread_pool.h"

namespace maitred {

constexpr int kBlock = 1024;     // values added up as one in a draw
constexpr int kScanBlock = 256;  // values scanned as one
constexpr int kLanes = 16;       // a block's values i, i + 16, i + 32 ... are a group; scan() gives the largest of each

struct SamplerKernels {
  // Writes the largest of each group of x[0..n) (kLanes for each kScanBlock begun, -inf for empty ones) and of each
  // kScanBlock; true if any is NaN. Fetches the row at `next` into the second cache by and by.
  bool (*scan)(const float* x, int64_t n, const float* next, float* group_max, float* block_max);
  // Writes for each block begun the sum of exp((x - largest) * sharpness) over its values that are at least lows[0],
  // which itself has a weight above 0 (see Task::lowest_weighing).
  void (*weigh)(const float* x, int64_t n, const float* lows, double largest, double sharpness, double* block_sums);
  // The same for each of two ascending lows, all sums of the first low before those of the next.
  void (*weigh_two)(const float* x, int64_t n, const float* lows, double largest, double sharpness, double* block_sums);
  // weigh and weigh_two in single precision, for kRoughRange: a sum errs by kRoughError of itself at most, in whatever
  // order it was added up, and e^-kRoughDepth for each value. Fetches `next` as scan does, for
  // what was asked for then may not have come, or be gone. Null where there are none.
  void (*weigh_roughly)(const float* x, int64_t n, const float* lows, double largest, double sharpness,
                        const float* next, double* block_sums);
  void (*weigh_two_roughly)(const float* x, int64_t n, const float* lows, double largest, double sharpness,
                            const float* next, double* block_sums);
  // Writes first + i to ids for each i with low <= x[i] < high, ascending; gives how many, of room for kLanes more.
  int64_t (*collect)(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids);
  // The same, but writes the values.
  int64_t (*collect_values)(const float* x, int64_t n, float low, float high, float* values);
  // weights[i] = exp((x[i] - largest) * sharpness)
  void (*weights)(const float* x, int64_t n, double largest, double sharpness, double* weights);
  // sums[c] is the sum of the weights whose x is at least lows[c], for two or four lows.
  void (*add_from_two)(const float* x, const double* weights, int64_t n, const float* lows, double* sums);
  void (*add_from_four)(const float* x, const double* weights, int64_t n, const float* lows, double* sums);
  // How many of x[0..n) are above value.
  int64_t (*count_above)(const float* x, int64_t n, float value);
  // Gives -inf to each x[i] whose bit, i % 32 of words[i / 32] from the lowest on, is 0.
  void (*mask)(float* x, int64_t n, const uint32_t* words);
};
const SamplerKernels& sampler_kernels(Isa isa);

// What changes logits before a token is chosen, in the order of the fields.
struct LogitChanges {
  const uint32_t* mask = nullptr;  // a bit for each of the vocabulary, see SamplerKernels::mask; null lets all be
  bool only_allowed = false;       // everything but allowed_ids gets -inf
  const int64_t* allowed_ids = nullptr;
  int64_t num_allowed = 0;
  const int64_t* banned_ids = nullptr;  // get -inf
  int64_t num_banned = 0;
  const int64_t* bias_ids = nullptr;  // distinct
  const float* bias = nullptr;
  int64_t num_bias = 0;
  float repetition = 1.0F;
  const int64_t* known_ids = nullptr;  // distinct; of prompt and output
  int64_t num_known = 0;
  float frequency = 0.0F;
  float presence = 0.0F;
  const int64_t* output_ids = nullptr;  // distinct
  const float* output_counts = nullptr;
  int64_t num_output = 0;

  // Whether most of the row is overwritten, so that what it was cannot be told from single values.
  bool covers() const { return only_allowed || mask != nullptr; }
};

// `outside`: an id of the changes is not in the vocabulary, and the row is as it was.
enum class SampleFault : int32_t { none = 0, nan = 1, infinite = 2, nothing = 3, nothing_allowed = 4, outside = 5 };

// One row's wishes and, below them, what became of it.
struct SampleRow {
  float* logits;                // [vocab_size]; overwritten where there are changes
  const LogitChanges* changes;  // may be null
  double temperature;           // 0 is greedy
  int64_t top_k;                // up to 0 and from vocab_size on: no limit
  double top_p;                 // 1 is no limit
  double min_p;                 // 0 is no limit
  double share;                 // the draw's random number, in [0, 1)
  int num_top;                  // likeliest tokens to list; below 0: no logprobs at all
  int32_t* top_ids;             // [num_top], best first
  double* logprobs;             // [1 + num_top] of the untouched logits: the chosen token's, then of top_ids
  int64_t* rank;                // of the chosen token, from 1

  int32_t token;
  SampleFault fault;
};

// executor/sampler.py's: a number in [0, 1), of its arguments only.
double uniform(uint64_t seed, uint64_t sample_index, uint64_t position);

class Sampler {
 public:
  Sampler(ThreadPool& pool, Isa isa);
  void sample(SampleRow* rows, int num_rows, int64_t vocab_size);

 private:
  struct Item {
    double weight;
    int64_t id;
  };
  struct LogitBefore {
    int64_t id;
    float logit;
  };
  // What was among the logits that changed.
  struct Before {
    bool is_nan = false, is_infinite = false, can_be_drawn = false;
  };
  // Memory of one thread, kept from call to call.
  struct Scratch {
    std::vector<float> groups, tops, folded, values, raw;
    std::vector<LogitBefore> undo;
    std::vector<int32_t> ids;
    std::vector<int64_t> starts;  // of each block in the list, and the list's end
    std::vector<double> weights, block_sums, cut_sums;
    std::vector<Item> items;
  };
  // The upper end of a row: logits above `logit`, and of those equal to it the ids up to last_id.
  struct Edge {
    float logit;
    int64_t last_id;
  };
  struct Buckets;  // in sampler_nucleus.cpp
  struct Task;     // one row in one thread's hands; in sampler_task.h

  ThreadPool& pool_;
  const SamplerKernels& kernels_;
  std::vector<Scratch> scratch_;
};

}  // namespace maitred
