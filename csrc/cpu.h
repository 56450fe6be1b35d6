// Which kernel paths this machine can run.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace kvern {

// Best first; only those that were built and that the processor and system support.
std::vector<std::string> available_paths();
// The named path, or the best one for an empty name. Throws std::invalid_argument when it cannot run here.
const KernelTable* select_path(const std::string& name);

}  // namespace kvern
