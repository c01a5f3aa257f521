//! A kernel with a script: it records requests, and answers them as for the device that the script describes.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::*;
use vm_memory::{Address, FileOffset, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::kernel::{Iotlb, Kernel};
use super::vduse::MessageTimeout;
use super::{Vdpa, VdpaError, VdpaSpec};
use crate::backend::mapping::Mapping;
use crate::backend::{DOORBELL_PAGE, DoorbellPage, RunnerQueue};
use crate::{GuestMap, Memory};

pub(crate) const PATH: &str = "/dev/vhost-vdpa-7";
pub(crate) const OWN_MAC: [u8; 6] = [0x52, 0x54, 0, 0xd, 0xd, 7];
/// The features that a VDUSE device may offer, and every vDPA device must.
pub(crate) const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_F_ACCESS_PLATFORM
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_STATUS
    | 1 << VIRTIO_NET_F_MRG_RXBUF;
/// Version 2 messages, and batches: every Linux since 5.8 offers them.
pub(crate) const PLAIN: u64 = 1 << 1 | 1 << 2;
pub(crate) const PERSIST: u64 = 1 << 8;

/// The properties of the device, the requests to it, and its behaviour.
pub(crate) struct Script {
    pub asked: Vec<String>,
    pub device_id: u32,
    pub features: u64,
    pub backend_features: u64,
    pub config: Vec<u8>,
    pub config_is_read_only: bool,
    pub queue_count: u32,
    pub iova: RangeInclusive<u64>,
    pub release: (u32, u32),
    /// The errors of requests that fail, by the request's first word.
    pub fails: Vec<(&'static str, i32)>,
    /// Ignores every status except 0, without an error.
    pub deaf: bool,
    pub status: u8,
    pub config_call: Option<EventFd>,
    /// The file with its doorbell pages, if it has any.
    pub doorbells: Option<std::fs::File>,
    /// The number of open handles.
    pub open: usize,
    /// The mappings that the device was sent, by first address.
    pub reached: BTreeMap<u64, Mapping>,
}

impl Default for Script {
    fn default() -> Self {
        let mut config = Vec::from(OWN_MAC);
        // Link up, one pair, an MTU of 1450.
        config.extend([1, 0, 1, 0]);
        config.extend(1450_u16.to_le_bytes());
        Self {
            asked: Vec::new(),
            device_id: 1,
            features: FEATURES,
            backend_features: PLAIN,
            config,
            config_is_read_only: true,
            queue_count: 2,
            iova: 0..=u64::MAX,
            release: (6, 12),
            fails: Vec::new(),
            deaf: false,
            status: 0,
            config_call: None,
            doorbells: None,
            open: 0,
            reached: BTreeMap::new(),
        }
    }
}

/// The test's hold on a scripted kernel.
#[derive(Clone, Default)]
pub(crate) struct Scripted(pub Arc<Mutex<Script>>);

struct Opened(Scripted);

impl Scripted {
    pub(crate) fn new(change: impl FnOnce(&mut Script)) -> Self {
        let scripted = Self::default();
        change(&mut scripted.0.lock());
        scripted
    }

    pub(crate) fn open(&self) -> Result<Vdpa, VdpaError> {
        self.open_as(VdpaSpec { path: PathBuf::from(PATH), mac: None, queue_pairs: 1 })
    }

    pub(crate) fn open_as(&self, spec: VdpaSpec) -> Result<Vdpa, VdpaError> {
        self.open_over(spec, &shared_memory())
    }

    pub(crate) fn open_over(&self, spec: VdpaSpec, memory: &Memory) -> Result<Vdpa, VdpaError> {
        let scripted = self.clone();
        let opener = move |_: &std::path::Path| {
            scripted.ask("open".into())?;
            scripted.0.lock().open += 1;
            Ok(Box::new(Opened(scripted.clone())) as Box<dyn Kernel>)
        };
        Vdpa::open_by(Box::new(opener), spec, memory)
    }

    /// The requests since the last call.
    pub(crate) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().asked)
    }

    /// The number of requests since the last call of [`Self::asked`] that add mappings.
    pub(crate) fn iotlb_updates(&self) -> usize {
        self.0.lock().asked.iter().filter(|asked| asked.starts_with("map")).count()
    }

    pub(crate) fn fail(&self, request: &'static str, errno: i32) {
        self.0.lock().fails.push((request, errno));
    }

    pub(crate) fn mend(&self) {
        let mut script = self.0.lock();
        script.fails.clear();
        script.deaf = false;
    }

    pub(crate) fn set_link(&self, up: bool) {
        let mut script = self.0.lock();
        script.config[6] = up.into();
        script.config_call.as_ref().map(|call| call.write(1));
    }

    /// Gives each queue's doorbell a page.
    pub(crate) fn give_doorbells(&self) {
        let file = rustix::fs::memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 3 * DOORBELL_PAGE).unwrap();
        self.0.lock().doorbells = Some(file.into());
    }

    /// Takes the last value that was written to the doorbell of `queue`.
    pub(crate) fn rung(&self, queue: u64) -> u16 {
        let script = self.0.lock();
        let (file, at) = (script.doorbells.as_ref().unwrap(), queue * DOORBELL_PAGE);
        let mut value = [0; 2];
        file.read_exact_at(&mut value, at).unwrap();
        file.write_all_at(&[0; 2], at).unwrap();
        u16::from_le_bytes(value)
    }

    fn ask(&self, request: String) -> io::Result<()> {
        let mut script = self.0.lock();
        let name = request.split_whitespace().next().unwrap_or_default();
        let error = script.fails.iter().find(|(fails, _)| *fails == name || *fails == request).map(|(_, errno)| *errno);
        script.asked.push(request);
        error.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut script = self.0.0.lock();
        script.asked.push("close".into());
        script.open -= 1;
        script.status = 0;
        script.reached.clear();
    }
}

impl Opened {
    fn ask(&self, request: impl Into<String>) -> io::Result<parking_lot::MutexGuard<'_, Script>> {
        self.0.ask(request.into())?;
        Ok(self.0.0.lock())
    }
}

impl Kernel for Opened {
    fn set_owner(&self) -> io::Result<()> {
        self.ask("owner").map(drop)
    }

    fn device_id(&self) -> io::Result<u32> {
        self.ask("device-id").map(|script| script.device_id)
    }

    fn backend_features(&self) -> io::Result<u64> {
        self.ask("backend-features").map(|script| script.backend_features)
    }

    fn set_backend_features(&mut self, features: u64) -> io::Result<()> {
        self.ask(format!("set-backend-features {features:#x}")).map(drop)
    }

    fn features(&self) -> io::Result<u64> {
        self.ask("features").map(|script| script.features)
    }

    fn set_features(&self, features: u64) -> io::Result<()> {
        self.ask(format!("set-features {features:#x}")).map(drop)
    }

    fn status(&self) -> io::Result<u8> {
        Ok(self.0.0.lock().status)
    }

    fn set_status(&self, status: u8) -> io::Result<()> {
        let mut script = self.ask(format!("status {status}"))?;
        script.status = if script.deaf { 0 } else { status };
        if status == 0 {
            script.config_call = None;
        }
        Ok(())
    }

    fn config_size(&self) -> io::Result<u32> {
        Ok(self.0.0.lock().config.len() as u32)
    }

    fn config(&self, offset: u32, data: &mut [u8]) -> io::Result<()> {
        let script = self.ask("config")?;
        data.copy_from_slice(&script.config[offset as usize..][..data.len()]);
        Ok(())
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        let mut script = self.ask(format!("set-config {data:x?}"))?;
        if !script.config_is_read_only {
            script.config[offset as usize..][..data.len()].copy_from_slice(data);
        }
        Ok(())
    }

    fn set_config_call(&self, call: &EventFd) -> io::Result<()> {
        self.ask("config-call")?.config_call = Some(call.try_clone()?);
        Ok(())
    }

    fn queue_count(&self) -> io::Result<u32> {
        self.ask("queue-count").map(|script| script.queue_count)
    }

    fn queue_size(&self) -> io::Result<u16> {
        self.ask("queue-size").map(|_| 256)
    }

    fn iova_range(&self) -> io::Result<RangeInclusive<u64>> {
        self.ask("iova-range").map(|script| script.iova.clone())
    }

    fn map(&self, message: Iotlb<'_>) -> io::Result<()> {
        let request = match message {
            Iotlb::Begin => "batch-begin".into(),
            Iotlb::Update(mapping) => format!("map {:#x}+{:#x}", mapping.iova(), mapping.size()),
            Iotlb::Invalidate(mapping) => format!("unmap {:#x}+{:#x}", mapping.iova(), mapping.size()),
            Iotlb::End => "batch-end".into(),
        };
        let reached = &mut self.ask(request)?.reached;
        match message {
            Iotlb::Update(mapping) => _ = reached.insert(mapping.iova(), *mapping),
            Iotlb::Invalidate(gone) => reached.retain(|_, part| part.last() < gone.iova() || gone.last() < part.iova()),
            Iotlb::Begin | Iotlb::End => {}
        }
        Ok(())
    }

    fn set_queue_size(&self, queue: &RunnerQueue) -> io::Result<()> {
        self.ask(format!("size {} {}", queue.index, queue.size)).map(drop)
    }

    fn set_queue_rings(&self, queue: &RunnerQueue) -> io::Result<()> {
        let [descriptors, available, used] = [queue.descriptors, queue.available, queue.used].map(|at| at.raw_value());
        self.ask(format!("rings {} {descriptors:#x} {available:#x} {used:#x}", queue.index)).map(drop)
    }

    fn set_queue_position(&self, queue: u16, position: u16) -> io::Result<()> {
        self.ask(format!("position {queue} {position}")).map(drop)
    }

    fn set_queue_kick(&self, queue: &RunnerQueue) -> io::Result<()> {
        assert!(queue.kick.as_raw_fd() >= 0);
        self.ask(format!("kick {}", queue.index)).map(drop)
    }

    fn set_queue_call(&self, queue: u16, _call: &EventFd) -> io::Result<()> {
        self.ask(format!("call {queue}")).map(drop)
    }

    fn enable_queue(&self, queue: u16) -> io::Result<()> {
        self.ask(format!("enable {queue}")).map(drop)
    }

    fn doorbell_page(&self, queue: u16) -> io::Result<DoorbellPage> {
        let script = self.ask(format!("doorbell {queue}"))?;
        let doorbells = script.doorbells.as_ref().ok_or_else(|| io::Error::from_raw_os_error(524))?;
        DoorbellPage::map(doorbells, queue)
    }

    fn queue_position(&self, queue: u16) -> io::Result<u16> {
        self.ask(format!("probe {queue}")).map(|_| 0)
    }

    fn suspend(&self) -> io::Result<()> {
        self.ask("suspend").map(drop)
    }

    fn resume(&self) -> io::Result<()> {
        self.ask("resume").map(drop)
    }

    fn message_timeout(&self) -> Option<MessageTimeout> {
        None
    }

    fn release(&self) -> (u32, u32) {
        self.0.0.lock().release
    }
}

/// Memory in two parts, which another process could map.
pub(crate) fn shared_memory() -> Memory {
    let file = rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x30_0000).unwrap();
    let file = Arc::new(std::fs::File::from(file));
    let part = |at, len, offset| (GuestAddress(at), len, Some(FileOffset::from_arc(Arc::clone(&file), offset)));
    let parts = [part(0, 0x10_0000, 0), part(1 << 32, 0x20_0000, 0x10_0000)];
    Memory::new(GuestMap::from_ranges_with_files(parts).unwrap())
}

/// A queue whose rings have distinct addresses.
pub(crate) fn queue(index: u16, position: u16) -> RunnerQueue {
    let eventfd = || Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let base = 0x1_0000 * u64::from(index + 1);
    RunnerQueue {
        index,
        size: 128,
        descriptors: GuestAddress(base),
        available: GuestAddress(base + 0x1000),
        used: GuestAddress(base + 0x2000),
        position,
        kick: eventfd(),
        call: eventfd(),
    }
}
