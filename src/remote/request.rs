//! From a command to the call that it makes.

use std::io::Read as _;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use serde::Serialize;
use vmm::api::{Link, RemoveDevice, Resize, SetVf};
use vmm::config::{DiskConfig, NetConfig, VdpaConfig, VfConfig};

use super::client::Call;
use super::command::{Command, LinkState};

type Error = Box<dyn std::error::Error>;

/// A call, and the descriptors that go with it.
#[derive(Debug)]
pub struct Prepared {
    /// The call.
    pub call: Call,
    /// Copies of the descriptors that were named.
    pub fds: Vec<OwnedFd>,
}

impl From<Call> for Prepared {
    fn from(call: Call) -> Self {
        Self { call, fds: Vec::new() }
    }
}

/// The call of a command. The options of devices are read by the grammar of the VMM's own command line.
///
/// # Errors
///
/// What cannot be read.
pub fn prepare(command: Command) -> Result<Prepared, Error> {
    let call = match command {
        Command::AddDisk { disk } => put("vm.add-disk", &disk.parse::<DiskConfig>()?)?,
        Command::AddNet { net, vf } => return add_net(&net, &vf),
        Command::AddVdpa { vdpa } => put("vm.add-vdpa", &vdpa.parse::<VdpaConfig>()?)?,
        Command::Create { file, vm } => {
            let body = match file {
                None if vm.is_given() => serde_json::to_string(&vm.into_config()?)?,
                None => read(Path::new("-"))?,
                Some(path) => read(&path)?,
            };
            Call { body: Some(body), ..Call::new("PUT", "vm.create") }
        }
        Command::RemoveDevice { id } => put("vm.remove-device", &RemoveDevice { id })?,
        Command::Resize { cpus, memory, balloon } => {
            let resize = Resize { desired_vcpus: cpus, desired_ram: memory, desired_balloon: balloon };
            put("vm.resize", &resize)?
        }
        Command::ResizeDisk { disk, size } => {
            put("vm.resize-disk", &serde_json::json!({"id": disk, "desired_size": size}))?
        }
        Command::ResizeZone { id, size } => {
            put("vm.resize-zone", &serde_json::json!({"id": id, "desired_ram": size}))?
        }
        Command::SetVf { pf, index, link, mac } => {
            let link = link.map(|link| if link == LinkState::Up { Link::Up } else { Link::Down });
            put("vm.set-vf", &SetVf { pf, index, link, mac })?
        }
        Command::Snapshot(to) => put("vm.snapshot", &serde_json::json!({"destination_url": to.url}))?,
        Command::Coredump(to) => put("vm.coredump", &serde_json::json!({"destination_url": to.url}))?,
        Command::Metrics => Call { path: "/metrics".to_string(), ..Call::new("GET", "") },
        other => bare(&other),
    };
    Ok(call.into())
}

/// The call of a command that has no body, or none yet: what the VMM says then is that it has no such endpoint.
fn bare(command: &Command) -> Call {
    match command {
        Command::Info | Command::Vfs { .. } => Call::new("GET", "vm.info"),
        Command::Counters => Call::new("GET", "vm.counters"),
        Command::Ping => Call::new("GET", "vmm.ping"),
        Command::Boot => Call::new("PUT", "vm.boot"),
        Command::Delete => Call::new("PUT", "vm.delete"),
        Command::Nmi => Call::new("PUT", "vm.nmi"),
        Command::Pause => Call::new("PUT", "vm.pause"),
        Command::PowerButton => Call::new("PUT", "vm.power-button"),
        Command::Reboot => Call::new("PUT", "vm.reboot"),
        Command::Resume => Call::new("PUT", "vm.resume"),
        Command::Shutdown => Call::new("PUT", "vm.shutdown"),
        Command::ShutdownVmm => Call::new("PUT", "vmm.shutdown"),
        Command::AddDevice(_) => Call::new("PUT", "vm.add-device"),
        Command::AddFs(_) => Call::new("PUT", "vm.add-fs"),
        Command::AddGenericVhostUser(_) => Call::new("PUT", "vm.add-generic-vhost-user"),
        Command::AddPmem(_) => Call::new("PUT", "vm.add-pmem"),
        Command::AddUserDevice(_) => Call::new("PUT", "vm.add-user-device"),
        Command::AddVsock(_) => Call::new("PUT", "vm.add-vsock"),
        Command::ReceiveMigration(_) => Call::new("PUT", "vm.receive-migration"),
        Command::Restore(_) => Call::new("PUT", "vm.restore"),
        Command::SendMigration(_) => Call::new("PUT", "vm.send-migration"),
        // These have bodies, and are made in `prepare`.
        Command::AddDisk { .. } => Call::new("PUT", "vm.add-disk"),
        Command::AddNet { .. } => Call::new("PUT", "vm.add-net"),
        Command::AddVdpa { .. } => Call::new("PUT", "vm.add-vdpa"),
        Command::Coredump(_) => Call::new("PUT", "vm.coredump"),
        Command::Create { .. } => Call::new("PUT", "vm.create"),
        Command::Metrics => Call::new("GET", ""),
        Command::RemoveDevice { .. } => Call::new("PUT", "vm.remove-device"),
        Command::Resize { .. } => Call::new("PUT", "vm.resize"),
        Command::ResizeDisk { .. } => Call::new("PUT", "vm.resize-disk"),
        Command::ResizeZone { .. } => Call::new("PUT", "vm.resize-zone"),
        Command::SetVf { .. } => Call::new("PUT", "vm.set-vf"),
        Command::Snapshot(_) => Call::new("PUT", "vm.snapshot"),
    }
}
