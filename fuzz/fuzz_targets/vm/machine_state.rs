#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::vm::machine_state::run(input));
