//! Feature bits, as every device handles them (`virtio 1.4 §2.2`).

/// True if `features` has `bit`.
pub(crate) fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}
