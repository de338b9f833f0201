#include "first_touch.h"

#include <algorithm>

namespace maitred {
namespace {

constexpr int64_t kPage = 4096;

// The page is written to and holds what it held, whatever other threads write there meanwhile.
void touch_page(uint8_t* byte) {
  uint8_t zero = 0;
  __atomic_compare_exchange_n(byte, &zero, uint8_t{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace

FirstTouch::FirstTouch(const KVPool& pool, int num_threads)
    : pool_(pool),
      num_threads_(num_threads),
      group_blocks_(static_cast<int>(std::max<int64_t>(1, pool.grain_bytes() / pool.layout().block_bytes))),
      used_(static_cast<size_t>((pool.num_blocks() + group_blocks_ - 1) / group_blocks_)) {}

void FirstTouch::plan(const StepRows& step) {
  units_.clear();
  for (int64_t i = 0; i < step.num_table_blocks(); ++i) {
    const int group = step.block_tables[i] / group_blocks_;
    if (!used_[static_cast<size_t>(group)]) use(group);
  }
  if (next_ == static_cast<int>(used_.size()) || used_[static_cast<size_t>(next_)]) return;
  for (int i = 0; i < num_threads_ && next_layer_ < pool_.num_layers(); ++i) units_.push_back({next_, next_layer_++});
}

void FirstTouch::use(int group) {
  used_[static_cast<size_t>(group)] = 1;
  for (int layer = group == next_ ? next_layer_ : 0; layer < pool_.num_layers(); ++layer)
    units_.push_back({group, layer});
  next_ = group + 1;
  next_layer_ = 0;
}

void FirstTouch::touch(WorkCounter& counter) const {
  for (int i = counter.take(); i < num_planned(); i = counter.take()) {
    const Unit& unit = units_[static_cast<size_t>(i)];
    const int first = unit.group * group_blocks_, count = std::min(group_blocks_, pool_.num_blocks() - first);
    uint8_t* const begin = pool_.block(unit.layer, first);
    uint8_t* const end = begin + count * pool_.layout().block_bytes;
    for (uint8_t* at = begin; at < end; at += kPage - static_cast<int64_t>(reinterpret_cast<uintptr_t>(at)) % kPage)
      touch_page(at);
  }
}

}  // namespace maitred
