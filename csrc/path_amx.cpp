// AVX-512 with VNNI and BF16, and tile registers for the products of many rows.
#define KVERN_PATH path_amx
#define KVERN_PATH_NAME "amx"
#define KVERN_TILES 1
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#ifdef KVERN_EMULATE_AVX512
#include "emulate_avx512.h"
#include "emulate_tiles.h"
#define __AVX512BF16__ 1
#endif
#include "family_types.h"
#include "half.h"
#include "layout.h"
#include "simd_avx512.h"
#include "amx_tiles.h"
#include "types.h"
#include "path.inc"

namespace kvern {
const KernelTable* amx_kernels() { return &KVERN_PATH::table; }
}  // namespace kvern
