//! A backend that runs the queues itself, and does what a test has scripted.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;
use vm_memory::GuestMemoryBackend;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::backend::{Ability, Attention, QueueRun, QueueRunner, RunnerError, RunnerQueue, StartError};
use crate::frames::net_protocol::Offloads;
use crate::net::testing::*;
use crate::{Backend, BackendKind, GuestMap};
pub(super) const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_CTRL_VQ;

/// The requests to the backend, and its answers.
#[derive(Default)]
pub(super) struct Script {
    pub asked: Vec<String>,
    pub queues: Vec<RunnerQueue>,
    /// The result of [`QueueRunner::stop`].
    pub positions: Vec<Option<u16>>,
    pub says: Option<Result<Attention, ()>>,
    pub refuses_start: bool,
    pub refuses_rings: bool,
    pub refuses_memory: bool,
    pub promised: (u64, Option<u16>),
    pub stays_lost: bool,
    pub needs_reset_after_stop: bool,
}

#[derive(Clone)]
pub(super) struct Scripted {
    pub script: Arc<Mutex<Script>>,
    pub speaks: Arc<EventFd>,
    pub ability: Ability,
}

impl Scripted {
    pub(super) fn new(pairs: u16) -> Self {
        let ability = Ability {
            kind: BackendKind::VhostNet,
            name: "scripted".into(),
            features: u64::MAX,
            queue_pairs: pairs,
            queue_size: 256,
            mac: None,
            mtu: None,
            control_queue: false,
            switches_offloads: true,
            logs_writes: false,
            has_state: false,
        };
        Self { script: Arc::default(), speaks: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()), ability }
    }

    pub(super) fn guest(&self, pairs: u16) -> Guest {
        Guest::over(spec(pairs, 16), Backend::Runner(Box::new(self.clone())))
    }

    pub(super) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.script.lock().asked)
    }

    pub(super) fn await_asked(&self, last: &str) -> Vec<String> {
        eventually(last, || self.script.lock().asked.last().is_some_and(|asked| asked == last));
        self.asked()
    }

    pub(super) fn say(&self, what: Result<Attention, ()>) {
        self.script.lock().says = Some(what);
        self.speaks.write(1).unwrap();
    }

    /// Interrupts the driver of `queue`, as the backend does.
    pub(super) fn interrupt(&self, queue: usize) {
        self.script.lock().queues[queue].call.write(1).unwrap();
    }
}

pub(super) fn lost() -> RunnerError {
    RunnerError { what: "continue", source: io::ErrorKind::BrokenPipe.into() }
}

impl QueueRunner for Scripted {
    fn ability(&self) -> Ability {
        self.ability.clone()
    }

    fn promise(&mut self, features: u64, mtu: Option<u16>) {
        self.script.lock().promised = (features, mtu);
    }

    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        let mut script = self.script.lock();
        let queues: Vec<_> = run.queues.iter().map(|queue| (queue.index, queue.position)).collect();
        script.asked.push(format!("start {queues:?} pairs={} fresh={}", run.active_pairs, run.fresh));
        script.queues = run.queues.to_vec();
        match () {
            () if script.refuses_start => Err(lost().into()),
            () if script.refuses_rings => Err(StartError::Refused(lost())),
            () => Ok(()),
        }
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        let mut script = self.script.lock();
        script.asked.push("stop".into());
        script.positions.clone()
    }

    fn goes_on_after_stop(&self) -> bool {
        !self.script.lock().needs_reset_after_stop
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError> {
        let mut script = self.script.lock();
        script.asked.push(format!("call {queue}"));
        let call = Arc::new(call.try_clone().unwrap());
        script.queues.iter_mut().filter(|other| other.index == queue).for_each(|other| other.call = Arc::clone(&call));
        Ok(())
    }

    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), RunnerError> {
        self.script.lock().asked.push(format!("pairs {pairs}"));
        Ok(())
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        self.script.lock().asked.push(format!("offloads {:#x}", offloads.bits()));
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError> {
        let mut script = self.script.lock();
        script.asked.push(format!("memory {}", memory.num_regions()));
        if script.refuses_memory { Err(lost()) } else { Ok(()) }
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        // SAFETY: the eventfd is open as long as it is borrowed.
        vec![unsafe { BorrowedFd::borrow_raw(self.speaks.as_raw_fd()) }]
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        let _ = self.speaks.read();
        self.script.lock().says.take().map_or(Ok(Attention::Nothing), |says| says.map_err(|()| lost()))
    }

    fn recover(&mut self) -> Result<(), RunnerError> {
        let _ = self.speaks.read();
        let mut script = self.script.lock();
        script.asked.push("recover".into());
        if script.stays_lost { Err(lost()) } else { Ok(()) }
    }
}
