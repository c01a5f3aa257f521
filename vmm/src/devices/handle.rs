//! The parts of an open device that the host uses while the guest may be using the device.

use virtio_devices::{SocketHandle, StorageLock, Switch};

use crate::devices::counters::NicCounters;
use crate::devices::disks::Disk;
use crate::devices::passed_taps::NicTaps;

/// Counters by name.
pub(super) type Counts = Vec<(&'static str, u64)>;

/// The host's handle of a device.
pub(super) enum Handle {
    /// Of a NIC.
    Net(NetHandle),
    /// Of a disk.
    Disk(Disk),
    /// Of a device of another kind.
    Plain {
        /// The kind, as in names of metrics.
        kind: &'static str,
        /// Reader of the counters.
        read: Box<dyn Fn() -> Counts + Send>,
        /// Host storage that its guest writes, if any.
        lock: Option<StorageLock>,
        /// The listening socket, if it has one.
        socket: Option<SocketHandle>,
    },
}

/// The host's handle of a NIC, or of a PF with its VFs.
pub(super) struct NetHandle {
    /// Counters of its own function, then those of its VFs by index.
    pub counters: Vec<NicCounters>,
    /// The switch, if it has one.
    pub switch: Option<Switch>,
    /// The taps.
    pub taps: NicTaps,
}

impl Handle {
    /// The handle of a device of `kind`, whose counters `read` reads.
    pub(super) fn plain(kind: &'static str, read: impl Fn() -> Counts + Send + 'static) -> Self {
        Self::Plain { kind, read: Box::new(read), lock: None, socket: None }
    }

    /// The kind of device, as in names of metrics, and the counters of each function until now.
    pub(super) fn counts(&self) -> (&'static str, Vec<Counts>) {
        match self {
            Self::Net(net) => ("net", NicCounters::counted(&net.counters)),
            Self::Disk(disk) => ("block", vec![disk.counters()]),
            Self::Plain { kind, read, .. } => (kind, vec![read()]),
        }
    }

    /// The counters of VF `index` of a virtio NIC until now; none of another device.
    pub(super) fn counts_of_vf(&self, index: u16) -> Counts {
        let Self::Net(net) = self else { return Counts::new() };
        let function = net.counters.get(1 + usize::from(index));
        function.map(|function| NicCounters::counted(std::slice::from_ref(function)).concat()).unwrap_or_default()
    }

    /// The disk, if the device is one.
    pub(super) const fn disk(&self) -> Option<&Disk> {
        match self {
            Self::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    /// The listening socket of the device, if it has one.
    pub(super) fn socket(&self) -> Option<SocketHandle> {
        match self {
            Self::Plain { socket, .. } => socket.clone(),
            Self::Net(_) | Self::Disk(_) => None,
        }
    }

    /// Host storage that the device writes, if any.
    pub(super) fn storage_lock(&self) -> Option<StorageLock> {
        match self {
            Self::Disk(disk) => Some(disk.storage_lock()),
            Self::Plain { lock, .. } => lock.clone(),
            Self::Net(_) => None,
        }
    }
}
