//! What runs a NIC's queues: workers of this process over a tap, or the backend itself. It decides what the NIC offers, and which
//! workers a driver's start needs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::features::{self, has, offered_by};
use super::given::Given;
use super::offload::Offloaded;
use super::worker::{Pair, Shared};
use super::{CONTROL_SIZE, MIN_MTU, Net, NetError, NetSpec};
use crate::backend::{Ability, Backend, BackendKind, DoorbellPages, Offload, Offloads, Tap};
use crate::worker::{spawn, spawn_all, thread_name};
use crate::{Start, Worker};

/// What runs the queues.
pub enum Engine {
    /// Workers of this process, a pair of queues each.
    Tap(Tap),
    /// The backend itself.
    Offload(Ability, Arc<Mutex<Box<dyn Offload>>>),
}

/// What a NIC is because of its backend.
pub struct Offered {
    /// The feature bits.
    pub features: u64,
    /// The MTU that the driver is told, in bytes.
    pub mtu: Option<u16>,
    /// The size of the control queue.
    pub control_size: u16,
    /// The backend's own address.
    pub mac: Option<[u8; 6]>,
    /// The doorbells that the backend lets the guest write to by itself.
    pub doorbells: Option<Arc<DoorbellPages>>,
}

impl Engine {
    /// What runs the queues of a NIC as `spec` describes it over `backend`, and what the NIC offers then.
    ///
    /// # Errors
    ///
    /// [`NetError`], when they do not fit.
    pub fn new(spec: &NetSpec, backend: Backend) -> Result<(Self, Offered), NetError> {
        match backend {
            Backend::Tap(tap) => over_tap(spec, tap),
            Backend::Offload(backend) => over_offload(spec, backend),
        }
    }

    /// What the backend is.
    pub fn kind(&self) -> BackendKind {
        match self {
            Self::Tap(_) => BackendKind::Tap,
            Self::Offload(ability, _) => ability.kind,
        }
    }

    /// The backend's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Tap(tap) => tap.name(),
            Self::Offload(ability, _) => &ability.name,
        }
    }
}

impl Net {
    /// Starts the workers of the queues of `start`.
    ///
    /// # Errors
    ///
    /// When an eventfd or a thread cannot be had. Nothing has been started then.
    pub(super) fn start_workers(&self, start: &Start) -> io::Result<Vec<Worker>> {
        match &self.engine {
            Engine::Tap(tap) => {
                let (pairs, shared) = (self.pairs_to_run(tap, start)?, self.shared(start));
                spawn_all(pairs, &shared.complete, |pair| self.spawn(pair, &shared))
            }
            Engine::Offload(ability, backend) => Ok(vec![self.start_offload(ability, backend, start)?]),
        }
    }

    /// The queue pairs that a driver with these features may use.
    pub(super) fn pairs(&self, features: u64) -> u16 {
        if has(features, VIRTIO_NET_F_MQ) { self.spec.queue_pairs } else { 1 }
    }

    /// Sorts the driver's queues by pair. The control queue follows the last pair that the driver knows of
    /// (`virtio 1.4 §5.1.2`). Pairs of which no queue is enabled have no worker.
    pub(super) fn pairs_to_run(&self, tap: &Tap, start: &Start) -> io::Result<Vec<Pair>> {
        let count = self.pairs(start.features);
        let queue = |index| start.queues.iter().find(|(other, _)| *other == index).cloned();
        let mut pairs = Vec::with_capacity(count.into());
        for (index, tap) in (0..count).zip(tap.queues()) {
            let (receive, transmit) = (queue(2 * index), queue(2 * index + 1));
            let control = if index == 0 { queue(2 * count) } else { None };
            if receive.is_none() && transmit.is_none() && control.is_none() {
                continue;
            }
            pairs.push(Pair {
                index,
                receive,
                transmit,
                control,
                tap: Arc::clone(tap),
                kick: eventfd()?,
                stop: Arc::new(AtomicBool::new(false)),
                peers: Vec::new(),
            });
        }
        let peers = pairs.iter().filter(|pair| pair.index > 0).map(|pair| Arc::clone(&pair.kick)).collect();
        if let Some(first) = pairs.first_mut().filter(|pair| pair.index == 0) {
            first.peers = peers;
        }
        Ok(pairs)
    }

    pub(super) fn shared(&self, start: &Start) -> Arc<Shared> {
        Arc::new(Shared {
            memory: start.memory.clone(),
            features: start.features,
            pairs: self.pairs(start.features),
            state: Arc::clone(&self.state),
            counters: Arc::clone(&self.counters),
            interrupts: Arc::clone(&start.interrupts),
            fresh: self.fresh,
            complete: Mutex::new(false),
        })
    }

    pub(super) fn spawn(&self, pair: Pair, shared: &Arc<Shared>) -> io::Result<Worker> {
        let queues = [&pair.receive, &pair.transmit, &pair.control];
        let queues: Vec<_> = queues.into_iter().flatten().map(|(index, _)| *index).collect();
        let (kick, stop) = (Arc::clone(&pair.kick), Arc::clone(&pair.stop));
        let shared = Arc::clone(shared);
        let name = thread_name(&self.spec.id, "qp", pair.index);
        let thread = spawn(name, move || pair.run(&shared))?;
        Ok(Worker::new(queues, kick, stop, thread))
    }

    /// The one worker of a backend that runs the queues itself.
    fn start_offload(
        &self,
        ability: &Ability,
        backend: &Arc<Mutex<Box<dyn Offload>>>,
        start: &Start,
    ) -> io::Result<Worker> {
        let control = 2 * self.pairs(start.features);
        // A driver that does not know of the control queue has none, whatever it enables.
        let passed_on = ability.control_queue && has(start.features, VIRTIO_NET_F_CTRL_VQ);
        let data = start.queues.iter().filter(|(index, _)| *index < control || passed_on && *index == control);
        let given = data.map(|(index, queue)| Ok(Given { index: *index, queue: Arc::clone(queue), kick: eventfd()? }));
        let given = given.collect::<io::Result<Vec<_>>>()?;
        let control = start.queues.iter().find(|(index, _)| *index == control && !ability.control_queue).cloned();
        let (kick, stop) = (eventfd()?, Arc::new(AtomicBool::new(false)));
        let mut doorbells: Vec<_> = given.iter().map(|given| (given.index, Arc::clone(&given.kick))).collect();
        doorbells.extend(control.iter().map(|(index, _)| (*index, Arc::clone(&kick))));
        let offloaded = Offloaded {
            id: self.spec.id.clone(),
            given,
            control,
            backend: Arc::clone(backend),
            health: Arc::clone(&self.health),
            kick: Arc::clone(&kick),
            stop: Arc::clone(&stop),
        };
        let shared = self.shared(start);
        *shared.complete.lock() = true;
        let thread = spawn(thread_name(&self.spec.id, "vq", 0), move || offloaded.run(&shared))?;
        Ok(Worker { doorbells, kick, stop, thread })
    }
}

fn over_tap(spec: &NetSpec, tap: Tap) -> Result<(Engine, Offered), NetError> {
    let queues = tap.queues().len();
    if queues != usize::from(spec.queue_pairs) || queues == 0 {
        return Err(NetError::QueuePairs { pairs: spec.queue_pairs, queues });
    }
    let offloads = offloads(spec) & tap.offloads();
    let mtu = known(spec.mtu.or(tap.mtu()));
    let features = features::offered(offloads, mtu.is_some(), queues > 1);
    Ok((Engine::Tap(tap), Offered { features, mtu, control_size: CONTROL_SIZE, mac: None, doorbells: None }))
}

fn over_offload(spec: &NetSpec, mut backend: Box<dyn Offload>) -> Result<(Engine, Offered), NetError> {
    let ability = backend.ability();
    let (name, pairs) = (ability.name.clone(), spec.queue_pairs);
    if pairs > ability.queue_pairs || pairs == 0 {
        return Err(NetError::TooFewPairs { name, pairs, has: ability.queue_pairs });
    }
    if spec.queue_size > ability.queue_size {
        return Err(NetError::TooLarge { name, size: spec.queue_size, has: ability.queue_size });
    }
    if !has(ability.features, VIRTIO_F_VERSION_1) {
        return Err(NetError::Legacy(name));
    }
    if let (Some(mtu), Some(has)) = (spec.mtu, ability.mtu)
        && mtu > has
    {
        return Err(NetError::Mtu { name, mtu, has });
    }
    let mtu = known(spec.mtu.or(ability.mtu));
    let unable = u64::from(!ability.switches_offloads && !ability.control_queue) << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
    let features = offered_by(ability.features & !unable, offloads(spec), mtu.is_some(), pairs > 1);
    backend.promise(features, mtu);
    // A vDPA device may filter frames by its address, and was told of one that the user gave. Of a process the configuration knows better.
    let mac = ability.mac.filter(|_| ability.kind == BackendKind::Vdpa);
    // One that the backend runs is no larger than the backend's queues.
    let control_size = if ability.control_queue { CONTROL_SIZE.min(ability.queue_size) } else { CONTROL_SIZE };
    let offered = Offered { features, mtu, control_size, mac, doorbells: backend.doorbell_pages() };
    Ok((Engine::Offload(ability, Arc::new(Mutex::new(backend))), offered))
}

/// An MTU that a driver may be told.
fn known(mtu: Option<u16>) -> Option<u16> {
    mtu.filter(|mtu| *mtu >= MIN_MTU)
}

fn offloads(spec: &NetSpec) -> Offloads {
    // Segments have checksums to be filled in (`virtio 1.4 §5.1.3.1`).
    if !spec.offload_csum {
        return Offloads::empty();
    }
    let mut offloads = Offloads::CHECKSUM;
    offloads.set(Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN, spec.offload_tso);
    offloads.set(Offloads::UFO | Offloads::USO4 | Offloads::USO6, spec.offload_ufo);
    offloads
}

fn eventfd() -> io::Result<Arc<EventFd>> {
    Ok(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?))
}
