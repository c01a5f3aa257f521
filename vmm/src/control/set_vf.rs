//! Checks and settings of `vm.set-vf`.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Map, Value};
use virtio_devices::{BackendKind, HostNic, MacError, NotYetReplaced, Replaced};

use crate::api::info::PolicyInfo;
use crate::api::{Failure, SetVf};
use crate::config::net::guest_control;
use crate::config::net::policy::{self, Carrier};
use crate::config::subject::Subject;
use crate::config::{
    LinkPolicy, MacAddress, MacChoice, NetConfig, NicPlan, PlannedVm, Problem, VfConfig, VfRange, VmConfig,
};
use crate::error_kind::ErrorKind;
use vm_api::config::net::guest_control::GuestSettings;

/// Longest wait for workers after a change of the guest.
const GUEST_PATIENCE: Duration = Duration::from_millis(100);

/// Returns the policy of VF `vf` of the NIC `id`, or of the NIC itself. `link` overrides its link, and `guest` has the
/// settings that the guest has made.
pub(super) fn policy_of(
    config: &VmConfig,
    id: &str,
    vf: Option<u16>,
    link: Option<LinkPolicy>,
    guest: &GuestSettings,
) -> PolicyInfo {
    let none = NetConfig::default();
    let net = config.net.iter().find(|net| net.id.as_deref() == Some(id)).unwrap_or(&none);
    let policy = match vf {
        None => policy::info_of(net),
        Some(index) => {
            let unsaid = VfConfig::default();
            let own = net.vf(index).unwrap_or(&unsaid).over(net, net.num_queues);
            if !guest.is_empty() {
                let link = link.or(own.policy.link).unwrap_or_default();
                let guest_set = guest.keys().into_iter().map(str::to_string).collect();
                return PolicyInfo { guest_set, ..policy::info_of(&guest_control::effective(&own, link, guest)) };
            }
            policy::info_of(&own)
        }
    };
    PolicyInfo { link: link.unwrap_or(policy.link), ..policy }
}

/// The differences of equal settings.
pub(super) const NOTHING: &str = "nothing";

/// Differences between the settings of a VF `before` and `after` a change: `vlan 0 -> 100, trust true -> false`; or
/// [`NOTHING`].
pub(super) fn changes(before: &Map<String, Value>, after: &Map<String, Value>) -> String {
    let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let text = |settings: &Map<String, Value>, key: &String| match settings.get(key) {
        None => "none".to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let differs = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    let lines: Vec<_> = differs.map(|key| format!("{key} {} -> {}", text(before, key), text(after, key))).collect();
    if lines.is_empty() { NOTHING.to_string() } else { lines.join(", ") }
}

/// Kind of a problem with the resulting VM. A conflict with another part of the VM is not a fault of the request.
pub(super) fn kind_of(problem: &Problem) -> ErrorKind {
    match problem {
        Problem::Conflict(_) => ErrorKind::Conflict,
        problem => problem.into(),
    }
}

/// Returns the plan of VF `index` of `pf`.
pub(super) fn plan_of<'p>(planned: &'p PlannedVm, pf: &str, index: u16) -> Option<&'p NicPlan> {
    let net = planned.plan().nets().find(|net| net.id() == pf)?;
    net.vfs.get(usize::from(index))
}

/// Checks that the open backend, which may differ from the planned one (`vhost=auto`), can enforce `plan`.
pub(super) fn check_enforced(plan: &NicPlan, kind: BackendKind, subject: &Subject) -> Result<(), Failure> {
    let Some(carrier) = Carrier::of_open(kind) else { return Ok(()) };
    policy::check_carried(&plan.spec, carrier, subject)
        .map_err(|error| Failure::new(kind_of(&error.problem), error.to_string()))
}

/// Sets a VF's planned MAC address, unless any address is allowed and the VF has it already.
pub(super) fn set_mac(
    port: &mut dyn HostNic,
    (change, index): (&SetVf, u16),
    (now, planned): (&NicPlan, &NicPlan),
    driven: bool,
) -> Result<Replaced, Failure> {
    let pf = &change.pf;
    let mac = MacAddress(planned.spec.mac);
    if change.mac == Some(MacChoice::Any) && now.spec.mac == planned.spec.mac {
        return Ok(Replaced::default());
    }
    // A vDPA device has a fixed address, and filters by it.
    if port.backend_kind() == BackendKind::Vdpa && port.mac() != mac.0 {
        let device = port.backend_name();
        let line = format!(
            "pf={pf},index={index},mac={mac}: a VF on {device} has that device's address; set another address in the \
             VF's configuration, before the PF is added"
        );
        return Err(Failure::new(ErrorKind::Conflict, line));
    }
    // With DRIVER set, the driver may have read the address, even before a queue runs. A switch applies the new address
    // at once: frames with the old one are no longer the function's.
    let set =
        if driven && port.backend_kind() != BackendKind::Switch { Err(MacError::InUse) } else { port.set_mac(mac.0) };
    set.map_err(|error| Failure::new(error.kind().into(), format!("pf={pf},index={index},mac={mac}: {error}")))
}

/// Waits until replaced settings of VF `index` of `pf` are out of use. Call it without the device's lock, which vCPUs
/// take.
///
/// # Errors
///
/// Fails if a worker still uses them after 5 s.
pub(super) fn settle(replaced: Replaced, pf: &str, index: VfRange) -> Result<(), Failure> {
    replaced.wait().map_err(|error| unsettled(&error, pf, index))
}

/// As [`settle`], for a change of the guest, which must not keep the control thread from others: at most 100 ms.
pub(super) fn settle_of_guest(replaced: Replaced, pf: &str, index: VfRange) -> Result<(), Failure> {
    replaced.wait_for(GUEST_PATIENCE).map_err(|error| unsettled(&error, pf, index))
}

fn unsettled(error: &NotYetReplaced, pf: &str, index: VfRange) -> Failure {
    Failure::new(ErrorKind::Host, format!("pf={pf},index={index}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_named_with_their_values_before_and_after() {
        let settings = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        let before = settings(r#"{"link": "auto", "storm": 0, "vlan": 0}"#);
        let after = settings(r#"{"link": "down", "storm": 0, "trunk": [5], "vlan": 100}"#);
        assert_eq!(changes(&before, &after), "link auto -> down, trunk none -> [5], vlan 0 -> 100");
        assert_eq!(changes(&after, &before), "link down -> auto, trunk [5] -> none, vlan 100 -> 0");
        assert_eq!(changes(&after, &after), NOTHING);
    }

    #[test]
    fn a_change_that_a_worker_has_not_taken_is_no_success() {
        settle(Replaced::default(), "pf0", VfRange::One(3)).unwrap();
        let failure = settle(virtio_devices::testing::never_replaced(), "pf0", VfRange::One(3)).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Host);
        let [line] = &failure.chain[..] else { panic!("{failure:?}") };
        let expected = "pf=pf0,index=3: the change is stored, but a worker of this function has been busy with packets";
        assert!(line.starts_with(expected) && !line.contains('\n'), "{line}");
    }

    /// With `vhost=auto`, the plan has packets in this process, but the open backend may be the kernel's.
    #[test]
    fn the_open_backend_decides_the_policies_that_can_be_enforced() {
        let plan = |vf: &str| {
            let mut config = VmConfig { net: vec!["id=pf0,sriov_vfs=1".parse().unwrap()], ..VmConfig::default() };
            let vf: crate::config::NetVf = format!("pf=pf0,index=0,vhost=auto{vf}").parse().unwrap();
            config.net[0].vfs.push(vf.vf);
            PlannedVm::new(config).unwrap()
        };
        let check = |vf: &str, kind| {
            let planned = plan(vf);
            check_enforced(plan_of(&planned, "pf0", 0).unwrap(), kind, &Subject::requested_vf("pf0", 0))
        };
        for (keys, named) in [
            (",vlan=5", "vlan"),
            (",trunk=[5]", "trunk"),
            (",spoofchk=on", "spoofchk"),
            (",trust=off", "trust"),
            (",max_tx_rate=5", "max_tx_rate"),
            (",storm=5", "storm"),
            (",ops_size=5,ops_refill_time=1", "rate_limiter_config"),
        ] {
            check(keys, BackendKind::Tap).unwrap();
            let failure = check(keys, BackendKind::VhostNet).unwrap_err();
            assert_eq!(failure.kind, ErrorKind::Conflict);
            let expected = format!(
                "pf=pf0,index=0 {named}: vhost-net carries this function's packets past this program; leave \
                 vhost out, or set it on the host (docs/policy.md)"
            );
            assert!(format!("{failure:?}").contains(&expected), "{failure:?}");
        }
        check(",mac=52:54:00:00:01:00", BackendKind::VhostNet).unwrap();
        assert!(plan_of(&plan(""), "pf0", 1).is_none());
    }
}
