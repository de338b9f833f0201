// A chain of steps of one program, each of which computes what the last one sampled: how a draft model makes up tokens
// (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192).
#pragma once

#include <cstdint>

#include "program.h"
#include "program_ops.h"
#include "sampler.h"

namespace maitred {

// What row r of R is sampled with, until it has num_tokens[r] tokens.
struct ChainRows {
  int width;                  // most tokens of a row
  const int32_t* num_tokens;  // [R] 1 .. width
  const double* settings;     // [R][4] temperature (0 is greedy), top_k, top_p, min_p
  const uint64_t* sequences;  // [R][3] seed, sample index and position of the first token: see uniform()
  int32_t* tokens;            // [R][width]
  int32_t* num_sampled;       // [R] fewer than num_tokens[r] where the sampler found a fault
  int32_t* faults;            // [R] SampleFault
  const int32_t* vocabulary;  // the token of each logit; null where they are the same
};

// What a head reads in the place of what it read at first: the rows of `from` that belong to the last logits, as the
// first rows of `to`.
struct Feedback {
  Rows from, to;
};

// Runs `first`, samples a token for each of its rows from the logits of the row's last token, and goes on with those
// that want more, a token each. `logits` are the rows that the program writes them to; `first` may leave out
// logits_tokens, and its block tables reach as far as the last token but one that is sampled. With feedback, which may
// be null, later steps go on from the program's state.
// Throws std::invalid_argument as Program::run does, and for rows that want too few or too many tokens.
void run_chain(Program& program, Sampler& sampler, const Rows& logits, StepRows first, const ChainRows& rows,
               const Feedback* feedback = nullptr);

}  // namespace maitred
