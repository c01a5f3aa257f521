//! Overrides of a restored VM for this host: backends of NICs, and NUMA nodes of memory zones. The changed
//! configuration is planned and checked as usual.

use std::collections::HashSet;

use crate::config::{
    BackendConfig, BackendPlan, DevicePlan, MissingBackend, NicPlan, OnMissingBackend, PlannedVm, RestoreConfig,
    RestoredBackend, RestoredNet, VmConfig, ZoneUpdate,
};
use crate::snapshot::state_file::SavedDescriptors;

/// Returns the backend of the NIC `id`, or of its VF; `None` if there is no such function.
fn backend<'a>(config: &'a mut VmConfig, id: &str, vf: Option<u16>) -> Option<&'a mut BackendConfig> {
    let net = config.net.iter_mut().find(|net| net.id.as_deref() == Some(id))?;
    match vf {
        None => Some(&mut net.backend),
        // The VFs of an X550 are its guest's.
        Some(index) if index < net.sriov_vfs && net.model.is_virtio() => Some(&mut net.vf_mut(index).backend),
        Some(_) => None,
    }
}

/// Removes descriptor numbers, which are invalid in another process. Returns the functions that had them.
pub(crate) fn take_descriptors(config: &mut VmConfig) -> Vec<SavedDescriptors> {
    let mut taken = Vec::new();
    for net in &mut config.net {
        let id = net.id.clone().unwrap_or_default();
        let own = (None, std::mem::take(&mut net.backend.fds));
        let vfs = net.vfs.iter_mut().map(|vf| (vf.index.one(), std::mem::take(&mut vf.backend.fds)));
        let all: Vec<_> = std::iter::once(own).chain(vfs).collect();
        let given = all.into_iter().filter(|(_, fds)| !fds.is_empty());
        taken.extend(given.map(|(vf, fds)| SavedDescriptors { id: id.clone(), vf, count: fds.len() }));
    }
    if let Some(platform) = &mut config.platform {
        // A VM with host devices cannot be saved, and one without can open its own iommufd.
        platform.iommufd_fd = None;
    }
    taken
}

/// Name of a network function in messages.
fn name(id: &str, vf: Option<u16>) -> String {
    vf.map_or_else(|| id.to_string(), |vf| format!("{id}/{vf}"))
}

/// Applies the overrides of `restore` to `config`. The functions in `needed` had descriptors, and must get new ones or
/// another backend.
///
/// # Errors
///
/// Fails with one line: the option, the function, and the remedy.
pub(crate) fn apply(config: &mut VmConfig, restore: &RestoreConfig, needed: &[SavedDescriptors]) -> Result<(), String> {
    move_zones(config, &restore.zone_updates)?;
    let mut given = HashSet::new();
    for RestoredNet { id, vf, num_fds, fds } in &restore.net_fds {
        let subject = format!("net_fds {}", name(id, *vf));
        let Some(known) = needed.iter().find(|known| known.id == *id && known.vf == *vf) else {
            return Err(format!("{subject}: the saved VM has no such NIC with descriptors; leave it out"));
        };
        if *num_fds != known.count || fds.len() != known.count {
            return Err(format!("{subject}: it had {} descriptors, and is given {num_fds}; give as many", known.count));
        }
        let backend = backend(config, id, *vf).ok_or_else(|| no_function(&subject))?;
        backend.fds.clone_from(fds);
        if !given.insert((id.as_str(), *vf)) {
            return Err(format!("{subject}: given twice; give it once"));
        }
    }
    for other in &restore.backends {
        replace(config, other)?;
        if !given.insert((other.id.as_str(), other.vf)) {
            return Err(format!("backends {}: given twice; give it once", name(&other.id, other.vf)));
        }
    }
    let is_missing = |known: &&SavedDescriptors| !given.contains(&(known.id.as_str(), known.vf));
    match needed.iter().find(is_missing) {
        _ if restore.on_missing_backend == OnMissingBackend::LinkDown => Ok(()),
        Some(SavedDescriptors { id, vf, count }) => {
            let name = name(id, *vf);
            Err(format!(
                "net_fds: {name} had {count} descriptors of taps; give it as many (net_fds=[{name}@[<fd>,...]])"
            ))
        }
        None => Ok(()),
    }
}

/// Changes the NUMA nodes of memory zones. Creating the memory checks that they exist.
fn move_zones(config: &mut VmConfig, updates: &[ZoneUpdate]) -> Result<(), String> {
    let mut moved = HashSet::new();
    for ZoneUpdate { id, host_numa_node } in updates {
        if !moved.insert(id) {
            return Err(format!("zone_updates {id}: given twice; give it once"));
        }
        let zone = config.memory.zones.iter_mut().find(|zone| zone.id == *id).ok_or_else(|| {
            format!("zone_updates {id}: the saved VM has no such memory zone; config.json lists them (memory.zones)")
        })?;
        zone.host_numa_node = Some(*host_numa_node);
    }
    Ok(())
}

fn no_function(subject: &str) -> String {
    format!("{subject}: the saved VM has no such NIC or VF; config.json lists them")
}

/// Marks backends that may be missing or are left out in `planned`, the plan of [`apply`]'s result.
///
/// # Errors
///
/// Fails for a port of a switch, which cannot be without a backend.
pub(crate) fn allow_missing(
    planned: &mut PlannedVm,
    restore: &RestoreConfig,
    needed: &[SavedDescriptors],
) -> Result<(), String> {
    let down =
        |id: &str, vf| restore.backends.iter().any(|other| other.link.is_some() && (&*other.id, other.vf) == (id, vf));
    let given = |id: &str, vf| {
        restore.net_fds.iter().any(|net| (&*net.id, net.vf) == (id, vf))
            || restore.backends.iter().any(|other| (&*other.id, other.vf) == (id, vf) && other.link.is_none())
    };
    let functions = planned.plan().nets().flat_map(|net| {
        let vfs = (0..).take(net.vfs.len()).map(Some);
        std::iter::once(None).chain(vfs).map(|vf| (net.id().to_string(), vf))
    });
    let x550s = planned.plan().devices.iter().filter_map(DevicePlan::x550);
    if let Some(x550) = x550s.into_iter().find(|x550| down(&x550.id, None)) {
        let (id, model) = (&x550.id, x550.model);
        let what = format!("an {model}'s link follows its uplink; give it another tap (tap=), or leave it out");
        return Err(format!("backends {id}@link=down: {what}"));
    }
    for (id, vf) in functions.collect::<Vec<_>>() {
        let Some(nic) = planned.nic_mut(&id, vf) else { continue };
        let is_down = down(&id, vf);
        if matches!(nic.backend, BackendPlan::Port(_)) {
            if is_down {
                let name = name(&id, vf);
                return Err(format!("backends {name}@link=down: it is a port of its PF's switch; leave it out"));
            }
            continue;
        }
        let lacks = needed.iter().any(|known| (&*known.id, known.vf) == (&*id, vf)) && !given(&id, vf);
        if lacks && let BackendPlan::Tap { vhost, .. } = nic.backend {
            nic.backend = BackendPlan::Fds { fds: Vec::new(), vhost };
        }
        nic.missing = match restore.on_missing_backend {
            _ if is_down => MissingBackend::LeftOut("left out when the VM came here (link=down)".to_string()),
            OnMissingBackend::LinkDown if lacks => {
                MissingBackend::LeftOut("no descriptors of its taps were given".to_string())
            }
            OnMissingBackend::LinkDown => MissingBackend::LinkDown,
            OnMissingBackend::Refuse => MissingBackend::Refused,
        };
    }
    Ok(())
}

/// Returns the functions that still wait for tap descriptors.
pub(crate) fn awaited_descriptors(planned: &PlannedVm) -> Vec<SavedDescriptors> {
    let functions = planned.plan().nets().flat_map(|net| {
        let vfs = (0..).map(Some).zip(&net.vfs);
        std::iter::once((None, &net.pf)).chain(vfs).map(|(vf, nic)| (net.id(), vf, nic))
    });
    let awaiting = functions.filter(|(_, _, nic)| nic.awaits_descriptors());
    let saved = |(id, vf, nic): (&str, Option<u16>, &NicPlan)| SavedDescriptors {
        id: id.to_string(),
        vf,
        count: nic.spec.queue_pairs.into(),
    };
    awaiting.map(saved).collect()
}

/// Replaces the backend of a function.
///
/// # Errors
///
/// Fails with the fault, in one line.
pub(crate) fn replace(config: &mut VmConfig, other: &RestoredBackend) -> Result<(), String> {
    let RestoredBackend { id, vf, tap, num_fds, fds, vhost_socket, vdpa, link } = other;
    let subject = format!("backends {}", name(id, *vf));
    let kinds = [tap.is_some(), num_fds.is_some() || !fds.is_empty(), vhost_socket.is_some(), vdpa.is_some()];
    if kinds.iter().filter(|given| **given).count() + usize::from(link.is_some()) != 1 {
        return Err(format!("{subject}: give one of tap, fds with num_fds, vhost_socket, vdpa or link"));
    }
    if num_fds.unwrap_or(fds.len()) != fds.len() {
        return Err(format!("{subject}: {} descriptors came for it instead of {}", fds.len(), num_fds.unwrap_or(0)));
    }
    let backend = backend(config, id, *vf).ok_or_else(|| no_function(&subject))?;
    if link.is_some() {
        // The plan leaves the backend out; its configuration stays for a later start.
        return Ok(());
    }
    let is_tap = tap.is_some() || !fds.is_empty();
    backend.tap.clone_from(tap);
    backend.fds.clone_from(fds);
    backend.vhost_user = vhost_socket.is_some();
    backend.vhost_socket.clone_from(vhost_socket);
    backend.vdpa.clone_from(vdpa);
    if !is_tap {
        backend.vhost = None;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NetConfig, VfConfig};

    fn config() -> VmConfig {
        let mut net: NetConfig = "id=pf0,fd=[7],sriov_vfs=4".parse().unwrap();
        for vf in ["index=0,tap=a,vhost=on", "index=1,fd=[8]", "index=2,vhost_user=on,socket=/s", "index=3,vdpa=/d"] {
            net.vfs.push(vf.parse().unwrap());
        }
        VmConfig { net: vec![net], ..VmConfig::default() }
    }

    fn applied(keys: &str) -> Result<VmConfig, String> {
        let mut config = config();
        let needed = take_descriptors(&mut config);
        apply(&mut config, &format!("source_url=/s,{keys}").parse().unwrap(), &needed)?;
        Ok(config)
    }

    #[test]
    fn descriptors_are_taken_out_and_have_to_be_given_again() {
        let mut all = config();
        let count = |id: &str, vf| SavedDescriptors { id: id.to_string(), vf, count: 1 };
        assert_eq!(take_descriptors(&mut all), [count("pf0", None), count("pf0", Some(1))]);
        assert_eq!(take_descriptors(&mut all), []);
        let again = applied("net_fds=[pf0@[20],pf0/1@[21]]").unwrap();
        assert_eq!((&again.net[0].backend.fds[..], &again.net[0].vfs[1].backend.fds[..]), (&[20][..], &[21][..]));
        for (keys, said) in [
            ("", "net_fds: pf0 had 1 descriptors of taps; give it as many (net_fds=[pf0@[<fd>,...]])"),
            (
                "net_fds=[pf0@[3]]",
                "net_fds: pf0/1 had 1 descriptors of taps; give it as many (net_fds=[pf0/1@[<fd>,...]])",
            ),
            ("net_fds=[pf0@[3,4]]", "net_fds pf0: it had 1 descriptors, and is given 2; give as many"),
            ("net_fds=[x@[3]]", "net_fds x: the saved VM has no such NIC with descriptors; leave it out"),
            ("net_fds=[pf0/0@[3]]", "net_fds pf0/0: the saved VM has no such NIC with descriptors; leave it out"),
            ("net_fds=[pf0@[3],pf0@[4]]", "net_fds pf0: given twice; give it once"),
        ] {
            assert_eq!(applied(keys).unwrap_err(), said);
        }
    }

    #[test]
    fn a_backend_takes_the_place_of_any_other() {
        let keys = "backends=[pf0@tap=p,pf0/0@vdpa=/v,pf0/1@socket=/n,pf0/2@tap=t,pf0/3@fd=[9]]";
        let config = applied(keys).unwrap();
        let net = &config.net[0];
        let printed: Vec<_> = net.vfs.iter().map(VfConfig::to_string).collect();
        assert_eq!(net.backend.tap.as_deref(), Some("p"));
        for (vf, expected) in printed.iter().zip(["vdpa=/v", "vhost_user=on,socket=/n", "tap=t", "fd=[9]"]) {
            assert!(vf.contains(expected), "{vf}");
            assert_eq!(["tap=", "fd=", "vdpa=", "socket="].iter().filter(|key| vf.contains(**key)).count(), 1, "{vf}");
        }
        assert!(!printed[0].contains("vhost=on"));
        PlannedVm::new(config).unwrap();
    }

    #[test]
    fn an_override_that_fits_no_function_is_refused() {
        for (keys, said) in [
            ("backends=[x@tap=t]", "backends x: the saved VM has no such NIC or VF; config.json lists them"),
            ("backends=[pf0/4@tap=t]", "backends pf0/4: the saved VM has no such NIC or VF; config.json lists them"),
            (
                "backends=[pf0/9@link=down]",
                "backends pf0/9: the saved VM has no such NIC or VF; config.json lists them",
            ),
            ("backends=[pf0/1@tap=t,pf0/1@tap=u]", "backends pf0/1: given twice; give it once"),
        ] {
            assert_eq!(applied(keys).unwrap_err(), said);
        }
    }

    #[test]
    fn an_x550_takes_another_uplink_and_no_other_override() {
        let planned = |keys: &str| {
            let net = "id=x,model=x550,tap=old,sriov_vfs=4".parse().unwrap();
            let mut config = VmConfig { net: vec![net], ..VmConfig::default() };
            let restore = format!("source_url=/s,{keys}").parse().unwrap();
            apply(&mut config, &restore, &[])?;
            let mut planned = PlannedVm::new(config).map_err(|error| error.to_string())?;
            allow_missing(&mut planned, &restore, &[])?;
            Ok(planned.config().net[0].backend.tap.clone().unwrap())
        };
        assert_eq!(planned("backends=[x@tap=new],on_missing_backend=link-down"), Ok("new".to_string()));
        for (keys, said) in [
            ("backends=[x/0@tap=t]", "backends x/0: the saved VM has no such NIC or VF; config.json lists them"),
            (
                "backends=[x@link=down]",
                "backends x@link=down: an X550's link follows its uplink; give it another tap (tap=), or leave it out",
            ),
        ] {
            assert_eq!(planned(keys), Err::<String, _>(said.to_string()));
        }
        assert!(planned("backends=[x@socket=/s]").unwrap_err().contains("the uplink of an X550 is a tap"));
    }

    #[test]
    fn memory_zones_move_to_other_nodes_of_the_host() {
        let mut config = config();
        config.memory.zones =
            ["id=a,size=1G,host_numa_node=3", "id=b,size=1G"].map(|zone| zone.parse().unwrap()).into();
        let mut applied = |keys: &str| {
            let restore = format!("source_url=/s,{keys}").parse().unwrap();
            apply(&mut config, &restore, &[])
                .map(|()| config.memory.zones.iter().map(|zone| zone.host_numa_node).collect())
        };
        assert_eq!(applied("zone_updates=[a@0,b@1]"), Ok(vec![Some(0), Some(1)]));
        for (keys, said) in [
            ("zone_updates=[a@0,a@1]", "zone_updates a: given twice; give it once"),
            (
                "zone_updates=[c@0]",
                "zone_updates c: the saved VM has no such memory zone; config.json lists them (memory.zones)",
            ),
        ] {
            assert_eq!(applied(keys), Err::<Vec<_>, _>(said.to_string()));
        }
    }

    fn missing(keys: &str) -> Result<Vec<MissingBackend>, String> {
        let mut config = config();
        let needed = take_descriptors(&mut config);
        let restore: RestoreConfig = format!("source_url=u,{keys}").parse().unwrap();
        apply(&mut config, &restore, &needed)?;
        let mut planned = PlannedVm::new(config).map_err(|error| error.to_string())?;
        allow_missing(&mut planned, &restore, &needed)?;
        let again = awaited_descriptors(&planned);
        let net = planned.plan().nets().next().unwrap();
        for (vf, nic) in [None, Some(0), Some(1), Some(2), Some(3)].into_iter().zip(net.functions()) {
            assert_eq!(again.iter().any(|known| known.vf == vf), nic.awaits_descriptors());
        }
        let mut replanned = PlannedVm::new(planned.config().clone()).unwrap();
        replanned.keep_slots(planned.plan());
        assert_eq!(replanned.plan(), planned.plan(), "what is missing is known after the next change, too");
        Ok(net.functions().map(|nic| nic.missing.clone()).collect())
    }

    #[test]
    fn a_backend_may_be_missing_if_the_caller_allows_it() {
        let fds = "net_fds=[pf0@[20],pf0/1@[21]]";
        assert_eq!(missing(fds).unwrap(), vec![MissingBackend::Refused; 5]);
        assert_eq!(missing(&format!("{fds},on_missing_backend=link-down")).unwrap(), vec![MissingBackend::LinkDown; 5]);
        let left_out = missing(&format!("{fds},backends=[pf0/2@link=down]")).unwrap();
        assert!(matches!(&left_out[3], MissingBackend::LeftOut(why) if why.contains("link=down")), "{left_out:?}");
        assert_eq!(left_out.iter().filter(|missing| **missing == MissingBackend::Refused).count(), 4);
    }

    #[test]
    fn missing_descriptors_leave_their_function_without_a_backend() {
        let missing = missing("net_fds=[pf0@[20]],on_missing_backend=link-down").unwrap();
        assert!(matches!(&missing[2], MissingBackend::LeftOut(why) if why.contains("descriptors")), "{missing:?}");
        assert_eq!(missing[1], MissingBackend::LinkDown);
    }
}
