// A LoRA adapter as PEFT saves it, as edgespec/runtimes/files/lora.py.
#pragma once
#include <string>

#include "adapters.h"

namespace edgespec {

// Adds the adapter of a folder to a store -> its number.  Throws std::invalid_argument, Failure: it is missing,
// damaged, of another kind or of another model; the store then has a number more, which is not to be used.
int add_lora(AdapterStore& store, const std::string& folder);

// Whether the matrices of a model of this architecture are those of its checkpoint, so that rows can be added to them.
bool takes_adapters(const std::string& architecture);

}  // namespace edgespec
