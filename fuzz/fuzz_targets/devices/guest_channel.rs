#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzz::devices::guest_channel::run(input));
