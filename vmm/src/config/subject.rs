//! Names of options in error messages.

use std::fmt::Display;

use vm_api::config::VfRange;

/// The start of an option as the user would write it, up to where the next key goes.
#[derive(Debug, Clone)]
pub(crate) struct Subject(String);

impl Subject {
    /// The device at position `index` of the `count` that `option` describes.
    pub(crate) fn device(option: &str, id: Option<&str>, index: usize, count: usize) -> Self {
        Self(match id {
            Some(id) => format!("{option} id={id},"),
            None if count == 1 => format!("{option} "),
            None => format!("{option} number {}, ", index + 1),
        })
    }

    /// VF `index` of the PF called `pf`.
    pub(crate) fn vf(pf: &str, index: impl Into<VfRange>) -> Self {
        Self(format!("--net-vf pf={pf},index={},", index.into()))
    }

    /// VF `index` of the PF called `pf`, as a request names both (`vm.set-vf`).
    pub(crate) fn requested_vf(pf: &str, index: u16) -> Self {
        Self(format!("pf={pf},index={index},"))
    }

    /// No subject: keys stand alone.
    pub(crate) const fn nothing() -> Self {
        Self(String::new())
    }

    /// The option without a further key.
    pub(crate) fn bare(&self) -> &str {
        self.0.trim_end_matches([',', ' '])
    }

    /// The option with a further key.
    pub(crate) fn key(&self, key: &str, value: impl Display) -> String {
        format!("{}{key}={value}", self.0)
    }
}
