// What low_rank_run.h says, with NEON's vectors.
#include "low_rank_run.h"
#include "vec_neon.h"

namespace maitred {

const LowRankKernels kLowRankNeon = low_rank_run::table<Vec4, 4>();

}  // namespace maitred
