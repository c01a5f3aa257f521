//! Governs the VFs of a guest from within.

fn main() {}
