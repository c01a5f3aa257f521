//! The vhost-user backends of devices, connected before their devices are plugged in.
//!
//! A backend may take minutes to map the guest's memory, or never answer. So backends are connected on a thread that
//! touches nothing else, and the waits can be cancelled.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use pci::VfIndex;
use virtio_devices::{
    Cancel, GuestMap, Memory, VhostUser, VhostUserDevice, VhostUserDeviceSpec, VhostUserError, VhostUserRole,
    VhostUserSocket, VhostUserSpec,
};
use vm_memory::GuestAddressSpace;

use crate::config::{BackendPlan, DeviceKind, DevicePlan, MissingBackend, VhostMode};

/// Connected backends, in the order of their devices, with the paths of their sockets.
#[derive(Default)]
pub(crate) struct VhostUserBackends {
    connected: Vec<(PathBuf, Connected)>,
    /// Backends that are missing, and may be.
    missing: Vec<(PathBuf, VhostUserError)>,
    /// The memory that the backends have mapped.
    memory: Option<Arc<GuestMap>>,
}

/// Reason why a backend cannot be used.
#[derive(Debug)]
pub(crate) struct PeerError {
    /// Option that names the function.
    pub option: String,
    /// Cause.
    pub error: VhostUserError,
}

/// A connected backend.
enum Connected {
    Nic(Box<VhostUser>),
    Device(Box<VhostUserDevice>),
}

/// A backend to connect.
struct Wanted<'a> {
    /// Option that names the function.
    option: String,
    path: &'a Path,
    what: What<'a>,
    /// True if its function can work without a backend until it is given one.
    may_be_missing: bool,
}

enum What<'a> {
    Nic { queue_pairs: u16, mode: VhostMode },
    Device(&'a VhostUserDeviceSpec),
}

impl VhostUserBackends {
    /// True if the device of `plan` has such backends.
    pub(crate) fn are_of(plan: &DevicePlan) -> bool {
        !wanted(plan).is_empty()
    }

    /// Connects the backends of `plans`. If backends connect to this program, all sockets listen before the first
    /// backend is waited for, with one deadline: backends may be started in any order.
    ///
    /// # Errors
    ///
    /// Fails with the first backend, in the order of the plans, that cannot be used or had not connected when `cancel`
    /// ended the waits. All others are closed.
    pub(crate) fn connect(plans: &[DevicePlan], memory: &Memory, cancel: Option<&Cancel>) -> Result<Self, PeerError> {
        let wanted: Vec<_> = plans.iter().flat_map(wanted).collect();
        let map = memory.memory().into_inner();
        let memory = Memory::from(Arc::clone(&map));
        let mut peers = Self { memory: Some(map), ..Self::default() };
        let mut listening = Vec::with_capacity(wanted.len());
        for wanted in &wanted {
            listening.push(peers.present(wanted, wanted.listen())?);
        }
        let until = Instant::now() + VhostUserSocket::PATIENCE;
        // One after the other: backends of one process are often served by one of its threads, which answers no other
        // request while it maps memory.
        for (socket, wanted) in listening.into_iter().zip(&wanted) {
            let Some(socket) = socket else { continue };
            let connected = wanted.connect(socket, until, &memory, cancel.cloned());
            if cancel.is_some_and(Cancel::is_cancelled) {
                // On failure, the other backends are closed as well.
                peers.connected.push((wanted.path.to_owned(), connected?));
            } else if let Some(connected) = peers.present(wanted, connected)? {
                peers.connected.push((wanted.path.to_owned(), connected));
            }
        }
        Ok(peers)
    }

    /// The backend for `wanted`; `None` if it is missing and `wanted` allows that.
    fn present<T>(&mut self, wanted: &Wanted<'_>, done: Result<T, PeerError>) -> Result<Option<T>, PeerError> {
        match done {
            Err(PeerError { error, .. }) if wanted.may_be_missing => {
                self.missing.push((wanted.path.to_owned(), error));
                Ok(None)
            }
            done => done.map(Some),
        }
    }

    /// Takes the reason why the backend at this path, which may be missing, is missing.
    pub(crate) fn take_error(&mut self, path: &Path) -> Option<VhostUserError> {
        let n = self.missing.iter().position(|(of, _)| of == path)?;
        Some(self.missing.swap_remove(n).1)
    }

    /// True if the backends have mapped `memory` as it is now.
    pub(crate) fn have(&self, memory: &Memory) -> bool {
        self.memory.as_ref().is_none_or(|map| Arc::ptr_eq(map, &memory.memory().into_inner()))
    }

    /// Takes the backend of a NIC at this path.
    pub(crate) fn nic(&mut self, path: &Path) -> Option<VhostUser> {
        match self.take(path)? {
            Connected::Nic(backend) => Some(*backend),
            Connected::Device(_) => None,
        }
    }

    fn take(&mut self, path: &Path) -> Option<Connected> {
        let n = self.connected.iter().position(|(of, _)| of == path)?;
        Some(self.connected.remove(n).1)
    }

    /// Takes the device over a backend at this path.
    pub(crate) fn device(&mut self, path: &Path) -> Option<VhostUserDevice> {
        match self.take(path)? {
            Connected::Device(device) => Some(*device),
            Connected::Nic(_) => None,
        }
    }
}

/// Option that names the device of `plan`, or its VF `vf`.
pub(super) fn function_option(plan: &DevicePlan, vf: Option<VfIndex>) -> String {
    match vf {
        Some(index) => format!("--net-vf pf={},index={index}", plan.id),
        None => plan.option(),
    }
}

/// The backends that the device of `plan` needs.
fn wanted(plan: &DevicePlan) -> Vec<Wanted<'_>> {
    if let DeviceKind::VhostUser(spec) = &plan.kind {
        let what = What::Device(spec);
        return vec![Wanted { option: plan.option(), path: &spec.socket, what, may_be_missing: false }];
    }
    let functions = std::iter::once(None).chain((0..).map(VfIndex).map(Some)).zip(plan.nics());
    let wanted = functions.filter_map(|(vf, nic)| match &nic.backend {
        BackendPlan::VhostUser { socket, mode } if !matches!(nic.missing, MissingBackend::LeftOut(_)) => {
            let may_be_missing = nic.missing == MissingBackend::LinkDown;
            let what = What::Nic { queue_pairs: nic.spec.queue_pairs, mode: *mode };
            Some(Wanted { option: function_option(plan, vf), path: socket, what, may_be_missing })
        }
        _ => None,
    });
    wanted.collect()
}

impl Wanted<'_> {
    /// The socket, which listens if the backend connects to it.
    fn listen(&self) -> Result<VhostUserSocket, PeerError> {
        match self.what {
            What::Nic { mode: VhostMode::Server, .. } => VhostUserSocket::listen(self.path.to_owned())
                .map_err(|error| PeerError { option: self.option.clone(), error }),
            _ => Ok(VhostUserSocket::of_peer(self.path.to_owned())),
        }
    }

    fn connect(
        &self,
        socket: VhostUserSocket,
        until: Instant,
        memory: &Memory,
        cancel: Option<Cancel>,
    ) -> Result<Connected, PeerError> {
        let connected = match self.what {
            What::Nic { queue_pairs, .. } => {
                let role = VhostUserRole::Nic { queue_pairs };
                let spec = VhostUserSpec { socket, role, until, cancel };
                VhostUser::connect(spec, memory).map(|backend| Connected::Nic(Box::new(backend)))
            }
            What::Device(spec) => {
                VhostUserDevice::connect(spec.clone(), memory, cancel).map(|device| Connected::Device(Box::new(device)))
            }
        };
        connected.map_err(|error| PeerError { option: self.option.clone(), error })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::time::Duration;

    use rustix::fs::MemfdFlags;
    use vm_memory::{FileOffset, GuestAddress};

    use super::*;
    use crate::config::{NetVf, VmConfig, VmPlan};

    fn memory() -> Memory {
        let file = File::from(rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        let range = (GuestAddress(0), 4096, Some(FileOffset::new(file, 0)));
        Memory::new(GuestMap::from_ranges_with_files([range]).unwrap())
    }

    /// A PF with VFs whose backends have sockets in `folder`, with `mode`.
    fn plan(folder: &Path, mode: &str, vfs: u16) -> DevicePlan {
        let folder = folder.display();
        let at = |name: &str| format!("vhost_user=on,vhost_mode={mode},socket={folder}/{name}");
        let mut config = VmConfig::default();
        config.net.push(format!("id=pf0,sriov_vfs={vfs},{}", at("pf.sock")).parse().unwrap());
        for index in 0..vfs {
            let vf = format!("pf=pf0,index={index},{}", at(&format!("vf{index}.sock")));
            config.net[0].vfs.push(vf.parse::<NetVf>().unwrap().vf);
        }
        config.memory.shared = true;
        let mut devices = VmPlan::of(&config).unwrap().devices.into_iter();
        devices.find(|device| device.net().is_some()).unwrap()
    }

    fn refusal(plan: DevicePlan) -> String {
        let error = VhostUserBackends::connect(&[plan], &memory(), None).map(|_| ()).unwrap_err();
        format!("{},{}", error.option, error.error)
    }

    #[test]
    fn all_sockets_listen_before_the_first_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let plan = plan(folder.path(), "server", 1);
        let [pf, vf] = ["pf.sock", "vf0.sock"].map(|name| folder.path().join(name));
        let connecting = std::thread::spawn(move || refusal(plan));
        // A backend of the last one connects first. Each disconnects at once, so the setup fails.
        for path in [vf, pf] {
            while UnixStream::connect(&path).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let error = connecting.join().unwrap();
        assert!(error.starts_with("--net id=pf0,") && error.contains("the peer closed the connection"), "{error}");
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "no socket is left");
    }

    #[test]
    fn the_first_backend_that_does_not_answer_ends_the_wait_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let plan = plan(folder.path(), "client", 7);
        let names = (0..7).map(|index| format!("vf{index}.sock")).chain(["pf.sock".to_string()]);
        let _mute: Vec<_> = names.map(|name| UnixListener::bind(folder.path().join(name)).unwrap()).collect();
        let begun = Instant::now();
        let error = refusal(plan);
        assert!(error.starts_with("--net id=pf0,") && error.contains("no answer within 2 s"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_cancel_ends_the_wait_for_all_peers_and_leaves_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let plan = plan(folder.path(), "server", 3);
        let cancel = Cancel::new().unwrap();
        let (ends, last) = (cancel.clone(), folder.path().join("vf2.sock"));
        let connecting =
            std::thread::spawn(move || VhostUserBackends::connect(&[plan], &memory(), Some(&cancel)).is_err());
        while !last.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        ends.cancel();
        assert!(connecting.join().unwrap());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "no socket is left");
    }
}
