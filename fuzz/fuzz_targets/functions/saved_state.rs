#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::functions::saved_state::run(input));
