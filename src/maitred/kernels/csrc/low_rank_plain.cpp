// What low_rank_run.h says, with plain C++'s vectors.
#include "low_rank_run.h"
#include "vec_plain.h"

namespace maitred {

const LowRankKernels kLowRankPlain = low_rank_run::table<Vec1, 2>();

}  // namespace maitred
