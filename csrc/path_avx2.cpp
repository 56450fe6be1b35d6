#define KVERN_PATH path_avx2
#define KVERN_PATH_NAME "avx2"
#define KVERN_WRITTEN_OUT  // inner loops in attend_avx2.h
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "family_types.h"
#include "half.h"
#include "layout.h"
#include "simd_avx2.h"
#include "types.h"
#include "path.inc"

namespace kvern {
const KernelTable* avx2_kernels() { return &KVERN_PATH::table; }
}  // namespace kvern
