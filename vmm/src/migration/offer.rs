//! Documents between the two sides: the description of the guest, and its state after the last page.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::MigrationError;
use super::fd_passing;
use super::passed_memory::{PassedState, TapState};
use crate::config::{PlannedVm, RestoreConfig, VmConfig, VmPlan};
use crate::devices::passed_taps::PassedTaps;
use crate::machine_state::MachineState;
use crate::machine_state::backend_state::{BackendOf, BackendState};
use crate::snapshot::overrides;
use crate::snapshot::state_file::{SavedDescriptors, SavedLink};

/// Description of the guest, from which the target creates its VM before pages arrive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Offer {
    /// Name and version of the source's program.
    pub program: String,
    /// Current configuration, without descriptors.
    pub config: Value,
    /// Functions whose backends came as descriptors.
    pub descriptors: Vec<SavedDescriptors>,
    /// VF links that clients have set.
    pub links: Vec<SavedLink>,
    /// Machine without its state: addresses, devices and slots, and CPUID.
    pub outline: MachineState,
    /// True if the guest runs, and must resume at the target.
    pub runs: bool,
    /// Memory and taps that are passed instead of copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<PassedState>,
    /// Backends whose own state follows with the machine's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stateful: Vec<BackendOf>,
}

/// State that follows the last page.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FinalState {
    /// Number of passes over the memory.
    pub passes: u32,
    /// State of the machine.
    pub machine: MachineState,
    /// State of backends besides their queues.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backends: Vec<BackendState>,
}

fn read<T: for<'de> Deserialize<'de>>(what: &str, bytes: &[u8]) -> Result<T, MigrationError> {
    serde_json::from_slice(bytes)
        .map_err(|error| MigrationError::Unsuitable(format!("the source's {what} has an unknown form: {error}")))
}

impl Offer {
    /// Serializes the offer.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be JSON.
    pub(crate) fn bytes(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }

    /// Parses an offer.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not one.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, MigrationError> {
        read("offer", bytes)
    }

    /// Plans the VM for this host, with devices in the source's slots.
    ///
    /// # Errors
    ///
    /// Fails if the configuration does not fit the overrides in `given`.
    pub(crate) fn plan(&self, given: &RestoreConfig) -> Result<PlannedVm, MigrationError> {
        let text = serde_json::to_vec(&self.config).map_err(|error| MigrationError::Unsuitable(error.to_string()))?;
        let mut config = VmConfig::from_json(&text)?;
        let is_passed = |known: &&SavedDescriptors| {
            let is_it = |tap: &TapState| (tap.of.id.as_str(), tap.of.vf) == (known.id.as_str(), known.vf);
            let all = self.passed.iter().flat_map(|passed| &passed.taps);
            all.filter(|tap| !tap.of.uplink).any(is_it) && !replaces(given, &known.id, known.vf)
        };
        let needed: Vec<_> = self.descriptors.iter().filter(|known| !is_passed(known)).cloned().collect();
        overrides::apply(&mut config, given, &needed).map_err(MigrationError::Unsuitable)?;
        let mut planned = PlannedVm::new(config)?;
        overrides::allow_missing(&mut planned, given, &self.descriptors).map_err(MigrationError::Unsuitable)?;
        for device in &self.outline.devices {
            planned.set_slot(&device.id, device.slot);
        }
        Ok(planned)
    }

    /// Receives the announced descriptors, at most as many as a VM of this configuration has.
    ///
    /// # Errors
    ///
    /// Fails if the peer sends anything else.
    pub(super) fn receive(
        &self,
        plan: &VmPlan,
        config: &VmConfig,
        fd_passing: Option<&UnixStream>,
    ) -> Result<Vec<OwnedFd>, MigrationError> {
        let (Some(passed), Some(stream)) = (&self.passed, fd_passing) else { return Ok(Vec::new()) };
        let count = passed.count(plan, config).map_err(MigrationError::Unsuitable)?;
        let received = fd_passing::receive(stream, count);
        received.map_err(|error| MigrationError::Unsuitable(format!("the source's descriptors: {error}")))
    }
}

/// True if `given` replaces the backend of this function.
fn replaces(given: &RestoreConfig, id: &str, vf: Option<u16>) -> bool {
    given.net_fds.iter().any(|net| net.id == id && net.vf == vf)
        || given.backends.iter().any(|backend| backend.id == id && backend.vf == vf)
}

/// Removes the taps of functions whose backends `given` replaces.
pub(super) fn not_replaced(mut taps: PassedTaps, given: &RestoreConfig) -> PassedTaps {
    taps.0.retain(|(of, _)| of.uplink || !replaces(given, &of.id, of.vf));
    taps
}

impl FinalState {
    /// Serializes the state.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be JSON.
    pub(crate) fn bytes(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }

    /// Parses a state.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not one.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, MigrationError> {
        read("state", bytes)
    }
}
