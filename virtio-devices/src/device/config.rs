//! Device configuration (`virtio 1.4 §2.5`) of a driver whose guest is restored with another device.
//!
//! Each device declares its fields, each with a rule. The saved state has the bytes that the driver could read. One
//! function compares them with the new device's: no device has its own check.

use crate::state::StateError;
use crate::transport::features::has;

#[cfg(test)]
mod tests;

/// Reads a device configuration of `bytes` at `offset`. Beyond its end it reads 0.
pub(crate) fn read(bytes: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
    data.fill(0);
    data.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
}

/// The requirement on a field when a guest with a driver is restored with another device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The value must be the same. Any other is refused.
    Same,
    /// The value is part of the device's own saved state. Refused if it cannot be restored.
    Saved,
    /// The device serves the driver with the saved value, if it can. Refused if it cannot.
    Served,
    /// A larger value is accepted, and announced to the driver. A smaller one is refused.
    Grows,
    /// Any value is accepted. A change is announced to the driver by a configuration change interrupt.
    Announced,
}

impl Rule {
    /// The rule's name in the documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Same => "compared",
            Self::Saved => "saved",
            Self::Served => "served",
            Self::Grows => "grows",
            Self::Announced => "announced",
        }
    }
}

/// A field of the device configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigField {
    /// The name in the standard, and the unit if it has one.
    pub name: &'static str,
    /// The offset in bytes.
    pub offset: u16,
    /// The length in bytes.
    pub len: u16,
    /// The feature without which drivers do not read the field.
    pub feature: Option<u32>,
    /// The requirement on its value.
    pub rule: Rule,
}

impl ConfigField {
    /// Creates a field that each driver reads.
    pub(crate) const fn new(name: &'static str, offset: u16, len: u16, rule: Rule) -> Self {
        Self { name, offset, len, feature: None, rule }
    }

    /// Restricts the field to drivers with this feature.
    pub(crate) const fn of(self, feature: u32) -> Self {
        Self { feature: Some(feature), ..self }
    }

    /// Creates reserved bytes.
    pub(crate) const fn reserved(offset: u16, len: u16) -> Self {
        Self::new("reserved", offset, len, Rule::Same)
    }

    /// Bytes of the field in `config`, a device configuration, if it is long enough.
    pub(crate) fn value<'c>(&self, config: &'c [u8]) -> Option<&'c [u8]> {
        config.get(self.offset.into()..usize::from(self.offset) + usize::from(self.len))
    }

    /// Number in the field, little-endian; 0 if `config` is too short or the field is not a number.
    pub(crate) fn number(&self, config: &[u8]) -> u64 {
        self.value(config).and_then(number).unwrap_or(0)
    }
}

/// The length that `fields` describe, in bytes.
pub(crate) fn length(fields: &[ConfigField]) -> usize {
    fields.last().map_or(0, |last| usize::from(last.offset) + usize::from(last.len))
}

/// Compares the configuration that a driver has read, `then`, with what it reads now. `accepted` are its features, if
/// it has chosen them. Returns true if a change must be announced. A state of an earlier version may have fewer fields.
///
/// # Errors
///
/// Fails with the name of a field whose change is not allowed.
pub(crate) fn compare(
    fields: &[ConfigField],
    then: &[u8],
    now: &[u8],
    accepted: Option<u64>,
) -> Result<bool, StateError> {
    if then.len() > length(fields) {
        return Err(StateError::Shape("lengths of device configuration"));
    }
    let mut announced = false;
    for field in fields {
        if field.feature.zip(accepted).is_some_and(|(bit, accepted)| !has(accepted, bit)) {
            continue;
        }
        let (Some(then), Some(now)) = (field.value(then), field.value(now)) else { continue };
        match field.rule {
            _ if then == now => {}
            Rule::Announced => announced = true,
            Rule::Grows if number(then) < number(now) => announced = true,
            Rule::Same | Rule::Saved | Rule::Served | Rule::Grows => {
                let (then, now) = (shown(then), shown(now));
                return Err(StateError::Told { what: field.name.to_string(), then, now });
            }
        }
    }
    Ok(announced)
}

/// A number of 1, 2, 4 or 8 bytes.
fn number(value: &[u8]) -> Option<u64> {
    if !matches!(value.len(), 1 | 2 | 4 | 8) {
        return None;
    }
    Some(value.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// A value, formatted for a user.
fn shown(value: &[u8]) -> String {
    /// The most bytes that are shown.
    const MOST: usize = 40;
    if let Some(number) = number(value) {
        return number.to_string();
    }
    let end = value.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let used = value.get(..end.min(MOST)).unwrap_or_default();
    if value.len() != 6 && !used.is_empty() && used.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return used.iter().map(|byte| char::from(*byte)).collect();
    }
    let digits = value.iter().take(MOST).map(|byte| format!("{byte:02x}"));
    digits.collect::<Vec<_>>().join(":")
}
