//! Virtio devices as PCI functions.
//!
//! This crate handles guest memory, file descriptors and virtqueues. It has no KVM, HTTP or ACPI.

mod backend;
mod balloon;
mod block;
mod chardev;
mod clock;
mod config_tables;
mod console;
mod counters;
mod device;
mod device_config;
mod discard;
mod effort;
mod error_kind;
mod eventfd;
mod failures;
mod features;
mod file_mapping;
mod function;
mod hex_bytes;
mod host;
mod interrupt;
mod iommu;
mod iovecs;
mod mem;
mod memory;
mod net;
mod net_protocol;
mod net_sriov;
mod new_file;
mod pmem;
mod policy;
mod port;
mod queue_worker;
mod rate_limiter;
mod ring;
mod rng;
mod rtc;
mod runner;
mod socket_path;
mod spill;
mod state;
mod switch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod thread;
mod transport;
mod vhost_user_device;
mod vsock;
mod walk;
mod watchdog;
mod worker;
mod zeros;

pub use backend::{
    Ability, Absent, Attention, BackendChange, BackendKind, BackendObserver, Cancel, DOORBELL_PAGE, DoorbellPage,
    DoorbellPages, InterfaceNameError, Locking, MAX_DEVICE_STATE, MemoryUser, PassedTap, QueueRun, QueueRunner,
    RunnerError, RunnerQueue, SharedLog, Tap, TapError, TapHandle, TapQueue, TapSpec, Vdpa, VdpaError, VdpaFault,
    VdpaSpec, VhostKernel, VhostNet, VhostNetError, VhostUser, VhostUserError, VhostUserRole, VhostUserSocket,
    VhostUserSpec, check_interface_name, is_network_mask, tap_name,
};
pub use balloon::{Balloon, BalloonCounter, BalloonCounters, BalloonSize, BalloonSpec};
pub use block::{
    Block, BlockCounter, BlockCounters, BlockError, BlockLatencies, BlockSize, BlockSpec, Hold, HoldError, Holds,
    ImageFormat, LockGranularity, ResizeError, backing_files,
};
pub use chardev::{CharDevice, CharError, CharSpec, PATIENCE, Woken};
pub use config_tables::{ConfigTable, config_tables};
pub use console::{Console, ConsoleCounter, ConsoleCounters, ConsoleSize, ConsoleWindow};
pub use device::{Start, VirtioDevice, Worker};
pub use device_config::{ConfigField, Rule};
pub use error_kind::ErrorKind;
pub use eventfd::borrow as borrow_eventfd;
pub use failures::{FailureChange, FailureObserver};
pub use file_mapping::FileMapping;
pub use function::{FunctionError, VirtioFunction};
pub use hex_bytes::HexBytes;
pub use host::{
    Doorbell, DoorbellObserver, Inspect, Lifecycle, MemoryArea, MemoryPeers, Message, NotResumed, Outcome, Pin,
    Signals, VirtioPci,
};
pub use interrupt::{Interrupts, NO_VECTOR, NeedsResetObserver};
pub use iommu::{ADDRESS_WIDTHS, Behind, Endpoint, Iommu, IommuCounter, IommuCounters, IommuDevice};
pub use mem::{Mem, MemCounter, MemCounters, MemRegion, MemSlots, MemSpec};
pub use memory::{
    DirtyBitmap, DirtySlice, DmaFollower, DmaMapping, DmaPass, DmaReach, DmaSpace, DmaView, GuestMap, GuestRegion,
    LogBusy, Memory, NotFollowed, PAGE_SIZE, Reach, SharedQueue, Translate, WriteLog,
};
pub use net::{
    Backend, Counter, Net, NetCounters, NetError, NetSpec, PolicyNotice, PolicyObserver, PortHandle, new_backend,
};
pub use net_protocol::Offloads;
pub use net_sriov::{NetSriov, NetSriovError};
pub use new_file::create_file;
pub use pmem::{Pmem, PmemCounter, PmemCounters, PmemError, PmemSpec};
pub use policy::{MAX_VLAN, NotYetReplaced, Policy, PortVlan, Replaced, Trunk, VlanProtocol, VlanSet};
pub use port::{ConnectError, FunctionStatus, MacError, NewBackend, Port, SriovStatus};
pub use rate_limiter::{RateLimit, RateLimitGroup, RateLimiter, RateLimits};
pub use rng::{Rng, RngCounter, RngCounters, RngError, RngSpec};
pub use rtc::{Rtc, RtcCounter, RtcCounters, RtcSpec};
pub use state::{
    AddressesState, BlockState, BucketState, BucketsState, DeviceSpecific, DeviceState, DomainState, FunctionState,
    HeldAddress, IommuState, MappingState, NicState, PositionState, QueueState, STATE_VERSION, StateError, ToldState,
    TransportState, VectorState, VfState, VfsState,
};
pub use switch::{MAX_PORTS, MAX_WORKERS, PortSettings, Switch, SwitchError, SwitchMode, SwitchSpec};
pub use thread::{NewThread, Panicked, Thread};
pub use transport::{QueueError, Status};
pub use vhost_user_device::{VhostUserDevice, VhostUserDeviceSpec, VhostUserKind};
pub use vsock::{Vsock, VsockCounter, VsockCounters, VsockError, VsockSpec};
pub use watchdog::{Expiry, Watchdog, WatchdogCounter, WatchdogCounters};
pub use worker::{StartWorker, WORKER_STACK, WorkerKind, start_workers_with};
pub use zeros::fill_with_zeros;
