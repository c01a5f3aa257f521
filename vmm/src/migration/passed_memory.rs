//! Descriptors for a target on the same host: guest memory, and what two programs cannot open by name at once, which
//! are taps and listening sockets.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::SealFlags;
use serde::{Deserialize, Serialize};
use virtio_devices::{PassedSockets, PassedTap, SocketHandle};
use vm_memory::{GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::config::{DevicePlan, MemoryConfig, VmConfig, VmPlan};
use crate::devices::passed_taps::{PassedTaps, TapOf};
use crate::vm::Vm;
use crate::vm::memory::PassedRegion;

/// Limit on a guest's memory regions, without those added at run time.
const MOST_REGIONS: usize = 64;

/// Descriptions of the passed descriptors, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PassedState {
    /// Memory regions, with one descriptor each.
    pub memory: Vec<RegionState>,
    /// Taps, with one descriptor per queue.
    pub taps: Vec<TapState>,
    /// Paths of listening sockets of vsock and consoles, with one descriptor each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sockets: Vec<PathBuf>,
}

/// A passed tap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TapState {
    /// Function of the tap.
    pub of: TapOf,
    /// Number of queues.
    pub queues: u16,
    /// MTU when the tap was opened, in bytes; `None` if it came as a descriptor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Supported offloads (`TUNSETOFFLOAD`).
    pub offloads: u32,
}

/// A passed memory region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegionState {
    /// First guest address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the descriptor's file, in bytes.
    pub offset: u64,
}

/// Descriptors that a source passes, and their descriptions.
pub(crate) type Passing = (PassedState, Vec<OwnedFd>);

/// Collects the memory, taps and `sockets` of `vm`.
///
/// # Errors
///
/// Fails if the memory is private, or the host has no descriptor left.
pub(crate) fn of_vm(vm: &Vm, sockets: &[SocketHandle]) -> Result<Passing, String> {
    let (mut state, mut fds) = (PassedState::default(), Vec::new());
    if vm.shared_memory().is_none() {
        let what = "the guest's memory is private to this program; start it with --memory shared=on";
        let instead = "or leave local out: memory is copied then, and backends= gives the receiver other taps";
        return Err(format!("local=true: {what}, {instead}"));
    }
    for region in vm.memory().memory().iter() {
        let Some(file) = region.file_offset() else { return Err("local=true: memory without a file".to_string()) };
        let fd = file.file().as_fd().try_clone_to_owned();
        fds.push(fd.map_err(|error| format!("local=true: the host has no descriptor left: {error}"))?);
        state.memory.push(RegionState { start: region.start_addr().0, len: region.len(), offset: file.start() });
    }
    let taps = PassedTaps::of(vm.devices().taps()).map_err(|(TapOf { id, vf, uplink }, error)| {
        let name = vf.map_or_else(|| id.clone(), |vf| format!("{id}/{vf}"));
        let tap = if uplink { format!("the uplink of {name}'s switch") } else { format!("the tap of {name}") };
        format!("local=true: {tap} cannot be passed: {error}; make it again, or leave local out")
    })?;
    for (of, PassedTap { mtu, offloads, queues }) in taps.0 {
        // A tap has at most 256 queues.
        let count = u16::try_from(queues.len()).unwrap_or(u16::MAX);
        state.taps.push(TapState { of, queues: count, mtu, offloads });
        fds.extend(queues);
    }
    for socket in sockets {
        let fd = socket.pass().map_err(|error| format!("local=true: the host has no descriptor left: {error}"))?;
        fds.push(fd);
        state.sockets.push(socket.path().to_owned());
    }
    Ok((state, fds))
}

impl PassedState {
    /// Counts the descriptors, and checks that a VM of `plan` and `config` has all of them.
    ///
    /// # Errors
    ///
    /// Fails if there are more.
    pub(crate) fn count(&self, plan: &VmPlan, config: &VmConfig) -> Result<usize, String> {
        let added = config.memory.room().unwrap_or(0) / MemoryConfig::STEP;
        let most = MOST_REGIONS.saturating_add(usize::try_from(added).unwrap_or(usize::MAX));
        if self.memory.len() > most {
            return Err(format!("the source passes {} parts of memory; a guest has at most {most}", self.memory.len()));
        }
        // Queues that each function may have; removed once counted.
        let mut room = HashMap::new();
        for net in plan.nets() {
            let functions = net.functions().zip(std::iter::once(None).chain((0..).map(Some)));
            let own = functions.map(|(nic, vf)| ((net.id(), vf, false), nic.spec.queue_pairs));
            room.extend(own.chain(net.switch.iter().map(|_| ((net.id(), None, true), 1))));
        }
        room.extend(plan.devices.iter().filter_map(DevicePlan::x550).map(|x550| ((x550.id.as_str(), None, true), 1)));
        let ends = [&config.serial, &config.console].into_iter().filter_map(|end| end.socket.as_ref());
        let mut paths: Vec<_> = ends.chain(config.vsock.as_ref().map(|vsock| &vsock.socket)).collect();
        for socket in &self.sockets {
            let Some(at) = paths.iter().position(|path| *path == socket) else {
                return Err(format!("the source passes a socket that this VM does not have: {}", socket.display()));
            };
            paths.swap_remove(at);
        }
        let mut count = self.memory.len() + self.sockets.len();
        for TapState { of: TapOf { id, vf, uplink }, queues, .. } in &self.taps {
            match room.remove(&(id.as_str(), *vf, *uplink)) {
                Some(most) if *queues <= most => count += usize::from(*queues),
                _ => return Err(format!("the source passes a tap that {id} does not have, or too many queues of it")),
            }
        }
        Ok(count)
    }

    /// Sorts `fds` into memory, taps and sockets.
    ///
    /// # Errors
    ///
    /// Fails if they do not match the description.
    pub(crate) fn open(&self, fds: Vec<OwnedFd>) -> Result<(Vec<PassedRegion>, PassedTaps, PassedSockets), String> {
        let mut fds = fds;
        let queues = self.taps.iter().map(|tap| usize::from(tap.queues)).sum::<usize>();
        if fds.len() != self.memory.len() + queues + self.sockets.len() {
            return Err("the source passes other descriptors than it describes".to_string());
        }
        let sockets = fds.split_off(self.memory.len() + queues);
        let sockets = PassedSockets(self.sockets.iter().cloned().zip(sockets).collect());
        let mut queues = fds.split_off(self.memory.len()).into_iter();
        let mut tap = |TapState { of, queues: count, mtu, offloads }: &TapState| {
            let queues = queues.by_ref().take(usize::from(*count)).collect();
            (of.clone(), PassedTap { mtu: *mtu, offloads: *offloads, queues })
        };
        let taps = PassedTaps(self.taps.iter().map(&mut tap).collect());
        Ok((self.regions(fds)?, taps, sockets))
    }

    fn regions(&self, fds: Vec<OwnedFd>) -> Result<Vec<PassedRegion>, String> {
        let wrong = |what: &str| format!("the source passes its guest's memory, and {what}");
        let region = |(state, fd): (&RegionState, OwnedFd)| {
            let RegionState { start, len, offset } = *state;
            // Seals first: from here on the size cannot shrink.
            let seals = rustix::fs::fcntl_get_seals(&fd);
            let is_sealed = seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
            let size =
                rustix::fs::fstat(&fd).map_err(|error| wrong(&format!("a file of it cannot be examined: {error}")))?;
            let (Some(end), Some(last)) = (start.checked_add(len), offset.checked_add(len)) else {
                return Err(wrong("a part of it has impossible addresses"));
            };
            // An access past the end of the file would kill this process.
            if u64::try_from(size.st_size).unwrap_or(0) < last {
                return Err(wrong("a file of it is too short"));
            }
            Ok(PassedRegion { range: start..end, file: Arc::new(File::from(fd)), offset, is_sealed })
        };
        self.memory.iter().zip(fds).map(region).collect()
    }
}

/// Checks that the memory of `vm` is exactly what was passed.
///
/// # Errors
///
/// Fails if it is not.
pub(crate) fn check(vm: &Vm, passed: &[PassedRegion]) -> Result<(), String> {
    let memory = vm.memory().memory();
    let is_passed = |region: &virtio_devices::GuestRegion| {
        let file = region.file_offset().map(vm_memory::FileOffset::arc);
        file.is_some_and(|file| passed.iter().any(|passed| Arc::ptr_eq(&passed.file, file)))
    };
    if memory.num_regions() == passed.len() && memory.iter().all(is_passed) {
        Ok(())
    } else {
        Err("the source passes its guest's memory, and its layout differs from this target's".to_string())
    }
}
