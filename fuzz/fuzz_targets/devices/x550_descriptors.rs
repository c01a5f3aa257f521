#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::devices::x550::descriptors::run(input));
