//! Plans a VM from its configuration, whose types are in [`vm_api`]: chooses each value that was left out, and finds
//! every mistake, before anything is opened.

pub(crate) mod capacity;
pub(crate) mod common_keys;
pub(crate) mod console;
pub(crate) mod cpus;
pub(crate) mod debug_console;
pub(crate) mod device;
pub(crate) mod disk;
pub(crate) mod guest_channel;
pub(crate) mod iommu;
pub(crate) mod json_names;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod names;
pub(crate) mod net;
pub mod numa;
pub(crate) mod on_off;
pub(crate) mod plan;
pub(crate) mod queue_affinity;
pub(crate) mod rate;
pub(crate) mod root_buses;
pub(crate) mod rtc;
pub(crate) mod segments;
pub(crate) mod shared_macs;
pub(crate) mod socket;
// Users of the project know this path.
#[path = "config_sriov.rs"]
pub(crate) mod sriov;
pub(crate) mod subject;
pub(crate) mod vfio;
pub(crate) mod virtio;

pub use vm_api::config::{
    BackendConfig, BalloonConfig, ConfigError, ConsoleConfig, ConsoleMode, CoreScheduling, CpuAffinity, CpuFeatures,
    CpuTopology, CpusConfig, DebugConsoleConfig, DeviceConfig, DeviceType, DiskConfig, FsConfig,
    GenericVhostUserConfig, HotplugMethod, ImageType, Key, LandlockAccess, LandlockConfig, LinkPolicy, LockGranularity,
    MacAddress, MacChoice, MemoryConfig, MemoryRestoreMode, MemoryZoneConfig, Mirror, NetConfig, NetVf, NoLink,
    NumaConfig, NumaDistance, OnMissingBackend, Options, ParseConsoleError, ParseMacError, PayloadConfig,
    PciSegmentConfig, PlatformConfig, PolicyConfig, Problem, RateLimitGroupConfig, RateLimiterConfig, RestoreConfig,
    RestoredBackend, RestoredNet, RngConfig, RtcConfig, SwitchMode, TokenBucketConfig, TpmConfig, VdpaConfig, VfConfig,
    VfRange, Vhost, VhostMode, VirtQueueAffinity, VlanProto, Vlans, VmConfig, VsockConfig, ZoneUpdate, bytes, grammar,
    help, json, unsupported,
};

pub use crate::config::device::{DeviceKind, DevicePlan, IommuSpec};
pub use crate::config::net::backend::{BackendPlan, MissingBackend};
pub use crate::config::net::switch::{SwitchPlan, UplinkPlan};
pub use crate::config::net::x550::X550Plan;
pub use crate::config::plan::{PlannedVm, VmPlan};
pub use crate::config::sriov::{NetPlan, NicPlan};
