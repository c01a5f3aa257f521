//! The device configuration (`virtio 1.4 §5.13.4`).

use super::table::{LAST_DOMAIN, PAGE};
use crate::device::config::{ConfigField, Rule};

/// Offset of the only writable field: bypass of endpoints in no domain.
pub(super) const BYPASS: u64 = 36;
/// The bytes reserved for an endpoint's properties.
pub(super) const PROBE_SIZE: usize = 512;
const LEN: usize = 40;
/// Pages of 4 KiB and of 2 MiB: Linux then maps a contiguous range with at most three requests.
const PAGE_SIZES: u64 = PAGE | 2 << 20;

/// The fields.
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("page_size_mask", 0, 8, Rule::Same),
    ConfigField::new("input_range.start", 8, 8, Rule::Same),
    ConfigField::new("input_range.end", 16, 8, Rule::Same),
    ConfigField::new("domain_range.start", 24, 4, Rule::Same),
    ConfigField::new("domain_range.end", 28, 4, Rule::Same),
    ConfigField::new("probe_size", 32, 4, Rule::Same),
    ConfigField::new("bypass", 36, 1, Rule::Saved),
    ConfigField::reserved(37, 3),
];

/// The bytes of the configuration.
pub(super) fn bytes(last_address: u64, bypass: bool) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &PAGE_SIZES.to_le_bytes());
    // Input range and domain range, each by its first and last value.
    put(8, &0u64.to_le_bytes());
    put(16, &last_address.to_le_bytes());
    put(24, &0u32.to_le_bytes());
    put(28, &LAST_DOMAIN.to_le_bytes());
    put(32, &(PROBE_SIZE as u32).to_le_bytes());
    put(BYPASS as usize, &[u8::from(bypass)]);
    bytes
}

/// Properties of each endpoint: messages for interrupts are written to this range, which is not memory. The last
/// property has type 0.
pub(super) fn properties() -> [u8; PROBE_SIZE] {
    const RESERVED_MEMORY: u16 = 1;
    const LEN: u16 = 20;
    const INTERRUPTS: u8 = 1;
    const FIRST: u64 = 0xfee0_0000;
    const LAST: u64 = 0xfeef_ffff;
    let mut bytes = [0; PROBE_SIZE];
    bytes[..2].copy_from_slice(&RESERVED_MEMORY.to_le_bytes());
    bytes[2..4].copy_from_slice(&LEN.to_le_bytes());
    bytes[4] = INTERRUPTS;
    bytes[8..16].copy_from_slice(&FIRST.to_le_bytes());
    bytes[16..24].copy_from_slice(&LAST.to_le_bytes());
    bytes
}
