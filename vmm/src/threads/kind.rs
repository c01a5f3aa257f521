//! Kinds of the program's threads.

use virtio_devices::WorkerKind;

/// The kinds of threads. Those of a kind may ask the same of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ThreadKind {
    /// Creates and changes the VM. It is the process's first, and nobody starts it.
    Main,
    /// Starts all others.
    Starter,
    /// Acquires what an action needs of vhost-user backends.
    Open,
    /// Writes a snapshot.
    Snapshot,
    /// Fills the memory of a restored guest.
    PageFaults,
    /// Has a part in a live migration: it decides, talks to the peer, or carries pages.
    Migration,
    /// Runs a vCPU and handles its exits.
    Vcpu,
    /// Waits for clients of the API.
    HttpServer,
    /// Reads, performs and answers requests.
    Http,
    /// Writes events.
    EventMonitor,
    /// Reads the serial port's input.
    Serial,
    /// Keeps a debug console's pseudo-terminal.
    DebugConsole,
    /// Carries the guest's TPM commands.
    Tpm,
    /// Works for a device.
    Worker(WorkerKind),
}

impl ThreadKind {
    /// The kinds that the starter starts, vCPUs first.
    pub(crate) fn started() -> impl Iterator<Item = Self> {
        use ThreadKind::{
            DebugConsole, EventMonitor, Http, HttpServer, Migration, Open, PageFaults, Serial, Snapshot, Tpm, Vcpu,
        };
        let others =
            [Vcpu, HttpServer, Http, EventMonitor, Serial, DebugConsole, Tpm, Open, Snapshot, PageFaults, Migration];
        others.into_iter().chain(WorkerKind::ALL.map(Self::Worker))
    }

    /// The name of a thread of this kind, which has a number or a device's name after it if there may be several.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            // That of the program.
            Self::Main | Self::Worker(_) => "",
            Self::Starter => "starter",
            Self::Open => "open",
            Self::Snapshot => "snapshot",
            Self::PageFaults => "page-faults",
            Self::Migration => "migration",
            Self::Vcpu => "vcpu",
            Self::HttpServer => "http-server",
            Self::Http => "http-",
            Self::EventMonitor => "event-monitor",
            Self::Serial => "serial",
            Self::DebugConsole => "debug-console",
            Self::Tpm => "tpm",
        }
    }
}
