//! Feature bits, common to all devices (`virtio 1.4 §2.2`).

/// True if `features` has `bit`.
pub(crate) fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}
