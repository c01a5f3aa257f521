//! Feature bits, common to all devices (`virtio 1.4 §2.2`).

/// True if `features` has `bit`.
pub(crate) fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

/// A feature that requires another one (`virtio 1.4 §2.2.1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureRequirement {
    /// The bit of the feature.
    pub feature: u32,
    /// The features of which it requires one, as a set of bits.
    pub any_of: u64,
    /// True if the device refuses the feature without them. Otherwise it works, and only the log has a note.
    pub enforced: bool,
    /// The requirement in words, such as "MQ needs CTRL_VQ".
    pub text: &'static str,
}

impl FeatureRequirement {
    /// True if a driver that chose `features` meets the requirement.
    pub(crate) const fn is_met(&self, features: u64) -> bool {
        features & (1 << self.feature) == 0 || features & self.any_of != 0
    }
}
