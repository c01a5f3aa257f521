//! Real Linux guests under the real binary.
