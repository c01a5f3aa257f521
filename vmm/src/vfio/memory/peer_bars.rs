//! BARs that host devices reach of each other (peer-to-peer), at the guest's addresses.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use virtio_devices::{FileMapping, MemoryPeers};

use crate::vfio::error::{VfioError, ranges};
use crate::vfio::memory::bar_memory::BarMemory;
use crate::vfio::memory::guest_memory::GuestMemory;

/// The BARs of a VM's host devices, for the host devices that reach all of the guest's memory.
#[derive(Debug, Default)]
pub(crate) struct PeerBars(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// BARs that the guest has mapped.
    bars: Vec<BarMemory>,
    /// Memory that the devices reach, while there are such devices.
    space: Weak<GuestMemory>,
    warned: bool,
}

impl PeerBars {
    /// Maps the BARs, now and later, for the devices of `space`.
    pub(crate) fn join(&self, space: &Arc<GuestMemory>) {
        let state = &mut *self.0.lock();
        state.space = Arc::downgrade(space);
        for bar in &state.bars {
            note(&mut state.warned, bar, space.map_bar(bar));
        }
    }
}

impl MemoryPeers for PeerBars {
    fn map(&self, address: u64, memory: &Arc<FileMapping>) {
        let state = &mut *self.0.lock();
        let bar = BarMemory { address, memory: Arc::clone(memory) };
        if let Some(space) = state.space.upgrade() {
            note(&mut state.warned, &bar, space.map_bar(&bar));
        }
        state.bars.push(bar);
    }

    fn unmap(&self, address: u64, memory: &Arc<FileMapping>) {
        let state = &mut *self.0.lock();
        let bar = BarMemory { address, memory: Arc::clone(memory) };
        state.bars.retain(|other| other.piece() != bar.piece());
        if let Some(Err(error)) = state.space.upgrade().map(|space| space.unmap_bar(&bar)) {
            log::error!("devices of the host may still reach a BAR that was at {address:#x}: {error}");
        }
    }
}

/// Logs that `bar` is out of reach: once for all BARs, as a guest can move them again and again.
fn note(warned: &mut bool, bar: &BarMemory, mapped: Result<(), VfioError>) {
    if let Err(error) = mapped
        && !std::mem::replace(warned, true)
    {
        log::warn!("{}", warning(bar, &error));
    }
}

fn warning(bar: &BarMemory, error: &VfioError) -> String {
    let why = match error {
        // The texts of both errors call the address the guest's memory.
        VfioError::Unreachable { reach, .. } => format!("they reach {}", ranges(reach)),
        VfioError::Map(error) => error.to_string(),
        error => error.to_string(),
    };
    format!(
        "devices of the host do not reach the BAR of another at {:#x}: {why}; they work without, and --platform \
         vfio_p2p_dma=off keeps this VM from trying",
        bar.address
    )
}

#[cfg(test)]
mod tests;
