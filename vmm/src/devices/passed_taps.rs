//! Taps that are handed to another program on this host, which cannot open them by name: those with one queue.

use std::io;

use serde::{Deserialize, Serialize};
use virtio_devices::{PassedTap, TapHandle};

/// Owner of a tap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TapOf {
    /// The NIC.
    pub id: String,
    /// The index of its VF; `None` for its own function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
    /// True if it is the uplink of the NIC's switch.
    #[serde(default)]
    pub uplink: bool,
}

/// The taps of a NIC that is plugged.
pub(crate) type NicTaps = Vec<(TapOf, TapHandle)>;

/// Taps from another program, with their owners.
#[derive(Debug, Default)]
pub(crate) struct PassedTaps(pub Vec<(TapOf, PassedTap)>);

impl PassedTaps {
    /// The tap of this owner, if it was passed.
    pub(crate) fn find(&self, of: &TapOf) -> Option<&PassedTap> {
        self.0.iter().find(|(other, _)| other == of).map(|(_, tap)| tap)
    }

    /// Duplicates the descriptors of all `taps`.
    ///
    /// # Errors
    ///
    /// Fails with the function whose tap cannot be passed, and the cause.
    pub(crate) fn of<'a>(taps: impl Iterator<Item = &'a (TapOf, TapHandle)>) -> Result<Self, (TapOf, io::Error)> {
        let pass = |(of, tap): &(TapOf, TapHandle)| match tap.pass() {
            Ok(passed) => Ok((of.clone(), passed)),
            Err(error) => Err((of.clone(), error)),
        };
        taps.map(pass).collect::<Result<_, _>>().map(Self)
    }
}
