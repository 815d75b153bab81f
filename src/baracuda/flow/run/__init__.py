"""One run of `baracuda quantize`: its steps, its journal, its report."""
