//! An Intel X550 with its VFs.

use super::net::{switch_files, uplink_file};
use super::site::{Opened, Site};
use crate::config::X550Plan;
use crate::devices::backends::BackendOpener;
use crate::devices::error::DeviceError;
use crate::error_kind::ErrorKind;
use crate::landlock::Rule;

/// MSI-X vectors of the PF and of each VF, each with an eventfd.
const VECTORS: u64 = 64;
const VF_VECTORS: u64 = 3;
/// Doorbell of the queues of a pool.
const OF_POOL: u64 = 1;

/// The reason why no X550 can be opened.
#[derive(Debug, thiserror::Error)]
#[error("model=x550: this version plans an X550 and cannot open it yet; give model=virtio")]
struct NotYet;

// To the lead: opening goes here. `plan.switch` is what `BackendOpener::switch` takes from `NetPlan::switch` (its ports
// are the PF and `plan.total_vfs` VFs), and the device is attached to the virtual IOMMU as in `net::open`. `NotYet`
// goes, and with it the notes in docs/guide/x550.md, docs/reference/x550.md and CHANGELOG.md.
pub(super) fn open(_: &X550Plan, site: &Site<'_>, _: &mut BackendOpener<'_>) -> Result<Opened, DeviceError> {
    Err(site.failed(ErrorKind::Unsupported, NotYet))
}

/// The file of the switch's uplink.
pub(super) fn files(plan: &X550Plan, option: &str) -> Vec<Rule> {
    uplink_file(&plan.switch, option).into_iter().collect()
}

/// The files of the switch's workers and uplink, and of all functions, enabled or not.
pub(super) fn open_files(plan: &X550Plan) -> u64 {
    switch_files(&plan.switch) + VECTORS + OF_POOL + u64::from(plan.total_vfs) * (VF_VECTORS + OF_POOL)
}

/// The switch's workers.
pub(super) fn threads(plan: &X550Plan) -> u64 {
    plan.switch.workers.into()
}
