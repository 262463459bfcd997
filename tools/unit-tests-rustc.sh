#!/bin/sh
# rustc for tests of the whole repository: compiles without optimisation what only unit tests run.
#
#   RUSTC_WORKSPACE_WRAPPER=$PWD/tools/unit-tests-rustc.sh cargo test --workspace
#
# A crate with unit tests is compiled twice, and the second copies take two fifths of the time that all tests take to
# compile. Programs and integration tests run optimised code as ever. So do the kernels' unit tests: they check what
# the optimiser makes of vector instructions. Their copy is the last to be compiled, so it takes all cores. Tests of
# quantization would run for longer than it takes to optimise them.
case " $* " in
  *" --crate-name anec_kernels "*" --test "*) exec "$@" -C codegen-units=4;;
  *" --crate-name anec_quant "*" --test "*) exec "$@" -C opt-level=1 -C codegen-units=4;;
  *" --crate-name anec_"*" --test "*) exec "$@" -C opt-level=0 -C codegen-units=4;;
esac
exec "$@"
