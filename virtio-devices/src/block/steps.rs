//! Runs the queue of a disk step by step on the caller's thread, one call on the image at a time, without waiting. For
//! fuzz targets.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::SERIAL;
use super::counters::{BlockCounter, BlockCounters, Tally};
use super::engine::Engine;
use super::error::BlockError;
use super::image::Image;
use super::image::access::{Access, ImageFormat, LockGranularity};
use super::latency::BlockLatencies;
use super::requests::{Disk, Next, Requests, Room};
use crate::device::failures::Failures;
use crate::net::steps::{Step, Stepped};
use crate::queue::ring::{BrokenRing, Ring};
use crate::transport::features::has;
use crate::{DmaView, GuestMap, Interrupts, SharedQueue};

/// The queue, which is run step by step.
pub struct BlockQueue<'q>(Ring<'q>);

/// A disk over a raw image.
pub struct BlockSteps {
    memory: DmaView,
    image: Arc<Image>,
    serial: [u8; SERIAL],
    engine: Engine,
    room: Vec<Room>,
    stable: AtomicBool,
    tally: Tally,
    counters: BlockCounters,
    latencies: BlockLatencies,
    failures: Failures,
    interrupts: Interrupts,
    features: u64,
}

impl BlockSteps {
    /// Opens a disk over the image at `path` with this serial number, whose driver negotiated `features`. With an
    /// `alignment` above 1, unaligned requests go through a buffer, as with direct I/O.
    ///
    /// # Errors
    ///
    /// Fails if the image cannot be used.
    pub fn open(
        memory: GuestMap,
        path: &Path,
        read_only: bool,
        alignment: usize,
        serial: [u8; SERIAL],
        features: u64,
    ) -> Result<Self, BlockError> {
        let (format, lock) = (ImageFormat::Raw, LockGranularity::ByteRange);
        let mut image = Image::open(path, Access { read_only, direct: false, format, sparse: true, lock })?;
        image.alignment = alignment;
        let image = Arc::new(image);
        Ok(Self {
            memory: DmaView::identity(&memory),
            engine: Engine::new(Arc::clone(&image)),
            image,
            serial,
            room: (0..2).map(|_| Room::default()).collect(),
            stable: AtomicBool::new(false),
            tally: Tally::new(),
            counters: BlockCounters::new(),
            latencies: BlockLatencies::default(),
            failures: Failures::new("_disk0", "image"),
            interrupts: Interrupts::new(1, 0),
            features,
        })
    }

    /// The value of a counter.
    pub fn count(&self, counter: BlockCounter) -> u64 {
        self.counters.get(counter)
    }
}

impl Stepped for BlockSteps {
    type Queue<'q> = BlockQueue<'q>;

    fn queue<'q>(&self, queue: &'q SharedQueue) -> Option<BlockQueue<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        Ring::open(0, queue.lock(), event_idx, &self.memory).ok().map(BlockQueue)
    }

    fn step(&mut self, BlockQueue(ring): &mut BlockQueue<'_>) -> Step {
        let disk = Disk {
            image: &self.image,
            serial: &self.serial,
            stable: &self.stable,
            counters: &self.counters,
            interrupts: &self.interrupts,
            latencies: &self.latencies,
            failures: &self.failures,
            limiter: None,
            stop: &AtomicBool::new(false),
        };
        let tally = &mut self.tally;
        let mut requests = Requests::new(disk, &mut self.engine, &self.memory, &mut self.room);
        let next = requests.turn(ring, tally).and_then(|next| requests.finish(ring, tally).map(|()| next));
        tally.flush(&self.counters);
        match next {
            Ok(Next::More) => Step::More,
            // There are no limits here.
            Ok(Next::Wait | Next::Limited(_)) => Step::Doorbell,
            Err(BrokenRing) => Step::Broken,
        }
    }

    fn take_interrupt(&self) -> bool {
        self.interrupts.take_isr() != 0
    }
}
