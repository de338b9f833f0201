// Which slots rows see, and the order in which a sweep reads. For attention_avx512.cpp and attention_amx.cpp.
#pragma once

#include "attention_avx512_formats.h"

namespace maitred {
namespace {

// Slots that any, and that all, of some rows see.
struct Seen {
  int first, end, common_first, common_end;
};

inline Seen seen_by(const Segment& work, int row, int count) {
  Seen seen{kSegmentSlots, 0, 0, kSegmentSlots};
  for (int r = row; r < row + count; ++r) {
    if (work.first[r] < work.end[r]) {
      seen.first = smaller(seen.first, work.first[r]);
      seen.end = larger(seen.end, work.end[r]);
    }
    seen.common_first = larger(seen.common_first, work.first[r]);
    seen.common_end = smaller(seen.common_end, work.end[r]);
  }
  return seen;
}

// The order in which a sweep reads, as memory has it: a few tiles at a time, head by head, first all K, then all V,
// then what comes next. One step ahead of it all is fetched.
class Walk {
 public:
  explicit Walk(const Segment& work)
      : layout_(*work.layout),
        next_(work.next_tiles),
        first_tile_(work.first_tile),
        end_tile_(work.end_tile),
        num_heads_(work.num_heads) {
    now_.tile = ahead_.tile = first_tile_;
    for (int tile = first_tile_; tile < end_tile_ + kSweepTiles; ++tile)
      tiles_[tile] = work.tiles[smaller(tile, end_tile_ - 1)];
    pass(ahead_);
  }
  bool in(int phase) const { return now_.phase == phase; }  // 0: K, 1: V
  int tile() const { return now_.tile; }
  int end_tile() const { return smaller(now_.tile + kSweepTiles, end_tile_); }
  int head() const { return now_.head; }
  Cells cells() const {
    const bool inside = ahead_.phase < 2;
    return {tiles_, shift(now_), inside ? tiles_ : next_, ahead_.tile - (inside ? 0 : first_tile_) - now_.tile,
            shift(ahead_)};
  }
  void advance() {
    pass(now_);
    pass(ahead_);
  }

 private:
  struct Place {
    int phase = 0, tile = 0, head = 0;
  };
  void pass(Place& place) const {
    if (++place.head < num_heads_) return;
    place.head = 0;
    place.tile += kSweepTiles;
    if (place.tile < end_tile_ || place.phase == 2) return;
    place.tile = first_tile_;
    ++place.phase;
  }
  int64_t shift(const Place& place) const {
    return place.head * layout_.head_stride + (place.phase == 1 ? layout_.v_offset : 0);
  }

  const KVLayout& layout_;
  const uint8_t* const* next_;
  const int first_tile_, end_tile_, num_heads_;
  Place now_, ahead_;
  const uint8_t* tiles_[kSegmentTiles + kSweepTiles];
};

}  // namespace
}  // namespace maitred
