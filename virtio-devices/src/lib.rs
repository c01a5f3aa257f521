//! Virtio devices as PCI functions.
//!
//! This crate handles guest memory, file descriptors and virtqueues. It has no KVM, HTTP or ACPI.
//!
//! Each kind of device is a module, such as [`block`], [`net`] or [`vsock`], and so is a PF with its VFs
//! ([`net_sriov`]). [`x550_sriov`] is a NIC without virtio. Smaller ones share a folder: [`memory_devices`] and
//! [`time_devices`]. They are built on:
//!
//! | module | subject |
//! |---|---|
//! | [`function`] | the PCI function around a device |
//! | [`device`] | the interface of a device, and the workers, counters and limits that devices share |
//! | [`backend`] | what moves frames or runs queues outside of this crate |
//! | [`frames`] | what NICs and switches share |
//! | [`transport`] | registers, features and interrupts |
//! | [`queue`] | the rings |
//! | [`memory`] | the guest's memory |
//! | [`state`] | saved state |
//! | [`os`] | the host's resources |

mod backend;
mod block;
#[cfg(test)]
mod config_tables {
    pub(crate) mod tests;
}
mod console;
mod device;
mod frames;
mod function;
mod guest_channel;
mod iommu;
mod memory;
mod memory_devices;
mod net;
mod net_sriov;
mod os;
mod queue;
mod rng;
mod state;
mod switch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time_devices;
mod transport;
mod vhost_user_device;
mod vsock;
mod x550_sriov;

pub use backend::{
    Ability, Absent, Attention, BackendChange, BackendKind, BackendObserver, Cancel, DOORBELL_PAGE, DoorbellPage,
    DoorbellPages, InterfaceNameError, Locking, MAX_DEVICE_STATE, MemoryUser, PassedTap, QueueRun, QueueRunner,
    RunnerError, RunnerQueue, SharedLog, Tap, TapError, TapHandle, TapQueue, TapSpec, Vdpa, VdpaError, VdpaFault,
    VdpaSpec, VhostKernel, VhostNet, VhostNetError, VhostUser, VhostUserError, VhostUserRole, VhostUserSocket,
    VhostUserSpec, check_interface_name, is_network_mask, tap_name,
};
pub use block::{
    Block, BlockCounter, BlockCounters, BlockError, BlockLatencies, BlockSize, BlockSpec, ImageFormat, LockGranularity,
    ResizeError, StorageLock, StorageLockError, StorageLocks, backing_files,
};
pub use console::{Console, ConsoleCounter, ConsoleCounters, ConsoleSize, ConsoleWindow};
pub use device::config::{ConfigField, Rule};
pub use device::counters::CounterText;
pub use device::driver_log::DriverLog;
pub use device::failures::{FailureChange, FailureObserver};
pub use device::fault::{Fault, FaultError};
pub use device::host_nic::{
    ConnectError, FunctionStatus, HostNic, HostSettings, MacError, NewBackend, ResetBy, SriovStatus, StoppedBy,
};
pub use device::rate_limiter::{RateLimit, RateLimitGroup, RateLimiter, RateLimits};
pub use device::worker::{StartWorker, WORKER_STACK, WorkerKind, start_workers_with};
pub use device::{Start, VirtioDevice, Worker};
pub use frames::net_protocol::Offloads;
pub use frames::policy::{MAX_VLAN, NotYetReplaced, Policy, PortVlan, Replaced, Trunk, VlanProtocol, VlanSet};
pub use function::host::{
    Doorbell, DoorbellObserver, Inspect, Lifecycle, MemoryArea, MemoryPeers, Message, NotResumed, Outcome, Pin,
    Signals, VirtioPci,
};
pub use function::{FunctionError, VirtioFunction};
pub use guest_channel::{
    ChannelCounter, ChannelCounters, ChannelEnd, ChannelLine, GuestChannel, MAX_LINE, MAX_MESSAGE, MAX_WAITING_NOTICES,
};
pub use iommu::{ADDRESS_WIDTHS, Endpoint, Iommu, IommuAttachment, IommuCounter, IommuCounters, IommuDevice};
pub use memory::file_mapping::FileMapping;
pub use memory::zeros::fill_with_zeros;
pub use memory::{
    DirtyBitmap, DirtySlice, DmaFollower, DmaMapping, DmaPass, DmaReach, DmaSpace, DmaView, GuestMap, GuestRegion,
    LogBusy, Memory, NotFollowed, PAGE_SIZE, Reach, SharedQueue, Translate, WriteLog,
};
pub use memory_devices::balloon::{Balloon, BalloonCounter, BalloonCounters, BalloonSize, BalloonSpec};
pub use memory_devices::mem::{Mem, MemCounter, MemCounters, MemRegion, MemSlots, MemSpec};
pub use memory_devices::pmem::{Pmem, PmemCounter, PmemCounters, PmemError, PmemSpec};
pub use net::{
    Backend, Counter, Net, NetCounters, NetError, NetSpec, PolicyNotice, PolicyObserver, PortHandle, new_backend,
};
pub use net_sriov::{NetSriov, NetSriovError};
pub use os::chardev::{CharDevice, CharError, CharSpec, PATIENCE, Woken};
pub use os::error_kind::ErrorKind;
pub use os::eventfd::borrow as borrow_eventfd;
pub use os::new_file::create_file;
pub use os::socket_path::{PassedSockets, SocketHandle};
pub use os::thread::{NewThread, Panicked, Thread};
pub use os::unmade_file::{why_no_file, why_no_socket};
pub use rng::{Rng, RngCounter, RngCounters, RngError, RngSpec};
pub use state::hex_bytes::HexBytes;
pub use state::{
    AddressesState, BlockState, BucketState, BucketsState, ChannelState, DeviceSpecific, DeviceState, DomainState,
    FunctionState, HeldAddress, IommuState, MappingState, NicState, OutboxState, PositionState, QueueState,
    STATE_VERSION, StateError, ToldState, TransportState, VectorState, VfState, VfsState,
};
pub use switch::{
    MAX_PORTS, MAX_WORKERS, PortSettings, Switch, SwitchError, SwitchMode, SwitchSpec, UplinkPolicy, X550Ports,
};
pub use time_devices::rtc::{Rtc, RtcCounter, RtcCounters, RtcSpec};
pub use time_devices::watchdog::{Expiry, Watchdog, WatchdogCounter, WatchdogCounters};
pub use transport::features::FeatureRequirement;
pub use transport::interrupt::{Interrupts, NO_VECTOR, NeedsResetObserver};
pub use transport::{QueueError, Status};
pub use vhost_user_device::{VhostUserDevice, VhostUserDeviceSpec, VhostUserKind};
pub use vsock::{Vsock, VsockCounter, VsockCounters, VsockError, VsockSpec};
pub use x550::{Model as X550Model, TOTAL_VFS as X550_VFS};
pub use x550_sriov::{DataPath, X550Error, X550Function, X550Handle, X550Spec, X550Sriov};
