//! From a plan to an open backend of a NIC.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use virtio_devices::{
    Backend, Memory, Tap, TapError, Vdpa, VdpaError, VhostKernel, VhostNet, VhostNetError, VhostUser, VhostUserError,
    VhostUserRole, VhostUserSocket, VhostUserSpec,
};

use crate::config::{BackendPlan, NicPlan, Options as _, VdpaConfig, Vhost, VhostMode};
use crate::error_kind::ErrorKind;

/// Why a NIC has no backend: one line, to follow the option that names the network function.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Its tap cannot be used.
    #[error(": {0}")]
    Tap(#[from] TapError),
    /// A file descriptor passed in is not open.
    #[error(",fd={0}: there is no such open file descriptor; open the tap before starting the VMM")]
    Fd(i32),
    /// The host's kernel does not carry its tap's packets.
    #[error(",vhost=on: {0}")]
    VhostNet(#[from] VhostNetError),
    /// The process that should carry its packets does not.
    #[error(",{0}")]
    VhostUser(#[from] VhostUserError),
    /// Its vDPA device cannot be used.
    #[error(",{key}={}: {}", error.path.display(), error.fault)]
    Vdpa {
        /// What the option calls the device's path.
        key: &'static str,
        /// Why.
        error: VdpaError,
    },
}

impl BackendError {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Tap(error) => error.kind().into(),
            Self::Fd(_) => ErrorKind::Invalid,
            Self::VhostNet(error) => error.kind().into(),
            Self::VhostUser(error) => error.kind().into(),
            Self::Vdpa { error, .. } => error.kind().into(),
        }
    }
}

/// Opens backends, those of one start of a VM or those of a device that comes later.
///
/// Sockets that backends connect to all listen before the first of these is waited for: whoever starts the backends
/// need not know an order, and one deadline is enough for all.
pub(crate) struct Opener<'a> {
    /// The guest's memory.
    memory: &'a Memory,
    /// Sockets that listen and have not been waited at yet.
    listening: HashMap<PathBuf, VhostUserSocket>,
    /// Until when backends may connect, once the first of them has been waited for.
    until: Option<Instant>,
    /// Why the kernel does not carry packets that it should carry if it can.
    without_vhost: Option<VhostNetError>,
}

impl<'a> Opener<'a> {
    /// Opens backends for a guest with this memory.
    pub(crate) fn new(memory: &'a Memory) -> Self {
        Self { memory, listening: HashMap::new(), until: None, without_vhost: None }
    }

    /// Listens for the backend of `plan` if it is one that connects.
    ///
    /// # Errors
    ///
    /// When the socket cannot be listened on.
    pub(crate) fn listen(&mut self, plan: &NicPlan) -> Result<(), BackendError> {
        if let BackendPlan::VhostUser { socket, mode: VhostMode::Server } = &plan.backend {
            self.listening.insert(socket.clone(), VhostUserSocket::listen(socket.clone())?);
        }
        Ok(())
    }

    /// Opens the backend of `plan`, which `option` names.
    ///
    /// # Errors
    ///
    /// When it does not exist or is in use. Anything opened or created for it is then closed and removed.
    pub(crate) fn open(&mut self, plan: &NicPlan, option: &str) -> Result<Backend, BackendError> {
        match &plan.backend {
            BackendPlan::Tap { spec, vhost } => self.carried(Tap::open(spec)?, *vhost),
            BackendPlan::Fds { fds, vhost } => {
                let duplicates = fds.iter().map(|fd| duplicate(*fd)).collect::<Result<_, _>>()?;
                self.carried(Tap::from_fds(duplicates)?, *vhost)
            }
            BackendPlan::VhostUser { socket, .. } => {
                let listening = self.listening.remove(socket);
                let until = match listening {
                    Some(_) => *self.until.get_or_insert_with(|| Instant::now() + VhostUserSocket::PATIENCE),
                    None => Instant::now(),
                };
                let socket = listening.unwrap_or_else(|| VhostUserSocket::of_peer(socket.clone()));
                let role = VhostUserRole::Nic { queue_pairs: plan.spec.queue_pairs };
                let spec = VhostUserSpec { socket, role, until };
                Ok(VhostUser::connect(spec, self.memory)?.into())
            }
            BackendPlan::Vdpa(spec) => {
                let key = if option.starts_with(VdpaConfig::OPTION) { "path" } else { "vdpa" };
                Ok(Vdpa::open(spec.clone(), self.memory).map_err(|error| BackendError::Vdpa { key, error })?.into())
            }
        }
    }

    /// `tap`, whose packets the kernel carries if `vhost` says so.
    fn carried(&mut self, tap: Tap, vhost: Vhost) -> Result<Backend, BackendError> {
        if vhost == Vhost::Off {
            return Ok(tap.into());
        }
        match VhostKernel::ask() {
            Ok(kernel) => Ok(VhostNet::new(tap, kernel).into()),
            Err(error) if vhost == Vhost::On => Err(error.into()),
            Err(error) => {
                self.without_vhost.get_or_insert(error);
                Ok(tap.into())
            }
        }
    }

    /// Why the kernel does not carry the packets of a tap with `vhost=auto` that was opened since the last call, if
    /// there is one.
    pub(crate) fn take_without_vhost(&mut self) -> Option<VhostNetError> {
        self.without_vhost.take()
    }
}

/// A file descriptor of our own for one that was passed in by number.
fn duplicate(fd: i32) -> Result<OwnedFd, BackendError> {
    // The configuration allows nothing below 3.
    if fd < 0 {
        return Err(BackendError::Fd(fd));
    }
    // SAFETY: the number is only used for this one call, which fails if it is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(fd) };
    passed.try_clone_to_owned().map_err(|_| BackendError::Fd(fd))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::time::Duration;

    use rustix::fs::MemfdFlags;
    use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::config::{NetVf, VmConfig, VmPlan};

    fn memory() -> Memory {
        let file = File::from(rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4096).unwrap();
        let range = (GuestAddress(0), 4096, Some(FileOffset::new(file, 0)));
        Memory::new(GuestMemoryMmap::from_ranges_with_files([range]).unwrap())
    }

    /// The functions of a PF and a VF whose backends connect to sockets in `folder`.
    fn plans(folder: &Path) -> Vec<NicPlan> {
        let folder = folder.display();
        let server = |name: &str| format!("vhost_user=on,vhost_mode=server,socket={folder}/{name}");
        let mut config = VmConfig::default();
        config.net.push(format!("id=pf0,sriov_vfs=1,{}", server("pf.sock")).parse().unwrap());
        config.net[0].vfs.push(format!("pf=pf0,index=0,{}", server("vf.sock")).parse::<NetVf>().unwrap().vf);
        config.memory.shared = true;
        VmPlan::of(&config).unwrap().nets().next().unwrap().functions().cloned().collect()
    }

    #[test]
    fn all_sockets_listen_before_the_first_is_waited_for_and_one_deadline_is_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let (plans, memory) = (plans(folder.path()), memory());
        let mut opener = Opener::new(&memory);
        plans.iter().for_each(|plan| opener.listen(plan).unwrap());
        // A backend of the last one may come first. It goes at once, so that nothing comes of it.
        drop(UnixStream::connect(folder.path().join("vf.sock")).unwrap());
        let begun = Instant::now();
        opener.until = Some(begun);
        let error = opener.open(&plans[0], "--net id=pf0").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("no backend connected within 10 s"), "{error}");
        let error = opener.open(&plans[1], "--net-vf pf=pf0,index=0").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("the peer closed the connection"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody was waited for");
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "no socket is left");
    }
}
