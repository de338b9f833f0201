#include "team.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include "gate.h"

namespace maitred {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int rank_of(int rank, int num_ranks, int threads_of_each) {
  if (rank < 0 || rank >= num_ranks || threads_of_each < 1)
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " with " +
                                std::to_string(threads_of_each) + " threads");
  return rank;
}

constexpr int64_t kStateInts = 3;  // of a StateRow, and of a StateSave

void copy(const int32_t* from, int64_t count, int32_t* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(int32_t));
}

}  // namespace

SharedMemory::SharedMemory(int fd, int64_t num_bytes) : mapped_bytes_(num_bytes + kHugePage), num_bytes_(num_bytes) {
  // Addresses first, so that the memory can begin where a huge page may.
  mapped_ =
      mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  begin_ = reinterpret_cast<uint8_t*>(round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped_)), kHugePage));
  if (mmap(begin_, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
           0) == MAP_FAILED) {
    const int error = errno;
    munmap(mapped_, static_cast<size_t>(mapped_bytes_));
    throw std::runtime_error("shared memory cannot be mapped: " + std::string(std::strerror(error)));
  }
#if defined(MADV_HUGEPAGE)
  madvise(begin_, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);  // small pages work too
#endif
}

SharedMemory::~SharedMemory() { munmap(mapped_, static_cast<size_t>(mapped_bytes_)); }

uint8_t* SharedMemory::take(int64_t num_bytes) {
  const int64_t first = round_up(num_taken_, num_bytes >= kHugePage ? kHugePage : 64);
  if (num_bytes < 0 || first + num_bytes > num_bytes_) throw std::bad_alloc();
  num_taken_ = first + num_bytes;
  return begin_ + first;
}

Team::Team(int fd, int64_t num_bytes, int rank, int num_ranks, int threads_of_each)
    : rank_(rank_of(rank, num_ranks, threads_of_each)),
      first_(rank * threads_of_each),
      num_threads_(num_ranks * threads_of_each),
      memory_(fd, num_bytes) {
  uint8_t* const place = memory_.take(sizeof(Shared));
  shared_ = leads() ? new (place) Shared{} : reinterpret_cast<Shared*>(place);
  if (leads()) shared_->barrier.expect(num_threads_);
}

void Team::reserve(int max_tokens, int max_logits, int64_t max_blocks) {
  const auto room = [&](int64_t count) {
    return reinterpret_cast<int32_t*>(memory_.take(count * static_cast<int64_t>(sizeof(int32_t))));
  };
  arrays_.token_ids = room(max_tokens);
  arrays_.positions = room(max_tokens);
  arrays_.first_tokens = room(max_tokens + 1);
  arrays_.first_blocks = room(max_tokens + 1);
  arrays_.block_tables = room(max_blocks);
  arrays_.logits_tokens = room(max_logits);
  arrays_.adapters = room(max_tokens);
  arrays_.states = room(max_tokens * kStateInts);
  arrays_.saves = room(max_tokens * kStateInts);  // one a token, at most
  max_tokens_ = max_tokens, max_logits_ = max_logits, max_blocks_ = max_blocks;
}

void Team::begin(const StepRows& rows, bool only_logits) {
  check();
  const int64_t num_blocks = only_logits ? 0 : rows.num_table_blocks();
  if (rows.num_tokens > max_tokens_ || rows.num_logits > max_logits_ || num_blocks > max_blocks_)
    throw std::invalid_argument("a step with block tables of " + std::to_string(num_blocks) +
                                " blocks in all; ranks share room for " + std::to_string(max_blocks_));
  if (!only_logits) {
    copy(rows.token_ids, rows.num_tokens, arrays_.token_ids);
    copy(rows.positions, rows.num_tokens, arrays_.positions);
    copy(rows.first_tokens, rows.num_rows + 1, arrays_.first_tokens);
    copy(rows.first_blocks, rows.num_rows + 1, arrays_.first_blocks);
    copy(rows.block_tables, num_blocks, arrays_.block_tables);
    if (rows.adapters != nullptr) copy(rows.adapters, rows.num_rows, arrays_.adapters);
    shared_->adapted = rows.adapters != nullptr;
    shared_->has_states = rows.states != nullptr;
    shared_->num_saves = rows.num_saves;
    if (rows.states != nullptr)
      copy(reinterpret_cast<const int32_t*>(rows.states), rows.num_rows * kStateInts, arrays_.states);
    if (rows.num_saves > 0)
      copy(reinterpret_cast<const int32_t*>(rows.saves), rows.num_saves * kStateInts, arrays_.saves);
  }
  copy(rows.logits_tokens, rows.num_logits, arrays_.logits_tokens);
  shared_->num_tokens = rows.num_tokens;
  shared_->num_rows = rows.num_rows;
  shared_->num_logits = rows.num_logits;
  shared_->num_groups = rows.num_groups;
  shared_->only_logits = only_logits;
  shared_->round.store(++seen_, std::memory_order_release);
  shared_->begins.open();
}

void Team::check() const {
  if (lost()) throw std::runtime_error(why_);
}

void Team::stop() {
  shared_->round.store(-1, std::memory_order_release);
  shared_->begins.open();
  shared_->barrier.abandon();  // a step that failed here has left them waiting in its middle
}

void Team::lose(const std::string& why) {
  if (losing_.exchange(true)) return;
  why_ = why;
  shared_->barrier.abandon();
}

bool Team::wait(StepRows& rows, bool& only_logits) {
  shared_->begins.wait([&] { return shared_->round.load(std::memory_order_acquire) != seen_; });
  seen_ = shared_->round.load(std::memory_order_acquire);
  if (seen_ < 0) return false;
  only_logits = shared_->only_logits;
  rows = StepRows{shared_->num_tokens,
                  shared_->num_rows,
                  shared_->num_logits,
                  arrays_.token_ids,
                  arrays_.positions,
                  arrays_.first_tokens,
                  arrays_.block_tables,
                  arrays_.first_blocks,
                  arrays_.logits_tokens,
                  shared_->adapted ? arrays_.adapters : nullptr,
                  shared_->has_states ? reinterpret_cast<const StateRow*>(arrays_.states) : nullptr,
                  reinterpret_cast<const StateSave*>(arrays_.saves),
                  shared_->num_saves,
                  shared_->num_groups};
  return true;
}

}  // namespace maitred
