//! The rules for binding disks' queues to host CPUs.

use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::{DiskConfig, VirtQueueAffinity};

use crate::config::cpus::HOST_CPUS;
use crate::config::subject::Subject;

/// Checks the bindings of a disk.
///
/// # Errors
///
/// Fails with the first mistake.
pub(crate) fn check(disk: &DiskConfig, subject: &Subject) -> Result<(), ConfigError> {
    for (n, VirtQueueAffinity { queue_index, host_cpus }) in disk.queue_affinity.iter().enumerate() {
        let fail = |problem| {
            let key = subject.key("queue_affinity", format!("[{queue_index}@...]"));
            Err(ConfigError::new(key, problem))
        };
        if disk.vhost_user {
            let what = "its backend runs the queues; leave queue_affinity out".to_string();
            return fail(Problem::Conflict(what));
        }
        if disk.queue_affinity.iter().take(n).any(|other| other.queue_index == *queue_index) {
            return fail(Problem::Conflict("the queue is there twice; give all of its CPUs at once".to_string()));
        }
        if host_cpus.is_empty() {
            return fail(Problem::Value("a queue needs a CPU of the host to run on; give one, or more".to_string()));
        }
        if let Some(cpu) = host_cpus.iter().find(|cpu| **cpu >= HOST_CPUS) {
            let what = format!("CPU {cpu} of the host: they are numbered 0 to {}; give one of these", HOST_CPUS - 1);
            return fail(Problem::Limit(what));
        }
    }
    Ok(())
}

/// The CPUs of each queue that the disk has.
pub(crate) fn plan(disk: &DiskConfig) -> Vec<(u16, Vec<u32>)> {
    let own = disk.queue_affinity.iter().filter(|queue| queue.queue_index < disk.num_queues);
    own.map(|queue| (queue.queue_index, queue.host_cpus.clone())).collect()
}

/// A line about each queue that the disk does not have, which Cloud Hypervisor accepts as well.
pub(crate) fn warnings(disk: &DiskConfig, subject: &Subject) -> Vec<String> {
    let last = disk.num_queues.saturating_sub(1);
    let missing = disk.queue_affinity.iter().filter(|queue| queue.queue_index >= disk.num_queues);
    let line = |queue: &VirtQueueAffinity| {
        let key = subject.key("queue_affinity", format!("[{}@...]", queue.queue_index));
        format!("{key}: the queues are 0 to {last}; it has no effect")
    };
    missing.map(line).collect()
}

#[cfg(test)]
mod tests {
    use crate::config::{DeviceKind, PlannedVm, VmConfig};

    fn planned(text: &str) -> Result<Vec<(u16, Vec<u32>)>, String> {
        let mut vm = VmConfig { cpus: "boot=4".parse().unwrap(), ..VmConfig::default() };
        vm.disks.push(text.parse().unwrap());
        let planned = PlannedVm::new(vm).map_err(|error| error.to_string())?;
        let disk = planned.plan().devices.iter().find_map(|device| match &device.kind {
            DeviceKind::Disk(spec) => Some(spec.queue_cpus.clone()),
            _ => None,
        });
        Ok(disk.unwrap())
    }

    #[test]
    fn a_queue_has_the_cpus_that_it_is_given() {
        let text = "path=/d,num_queues=4,queue_affinity=[0@[0-2],3@[7,1023]]";
        assert_eq!(planned(text), Ok(vec![(0, vec![0, 1, 2]), (3, vec![7, 1023])]));
        assert_eq!(planned("path=/d,queue_affinity=[]"), Ok(Vec::new()));
    }

    #[test]
    fn a_queue_that_is_not_there_is_taken_with_a_warning() {
        let mut vm = VmConfig { cpus: "boot=4".parse().unwrap(), ..VmConfig::default() };
        vm.disks.push("path=/d,num_queues=2,queue_affinity=[1@[3],2@[0]]".parse().unwrap());
        let warnings = &PlannedVm::new(vm).unwrap().plan().warnings.clone();
        assert_eq!(warnings, &["--disk queue_affinity=[2@...]: the queues are 0 to 1; it has no effect"]);
        assert_eq!(planned("path=/d,num_queues=2,queue_affinity=[1@[3],2@[0]]"), Ok(vec![(1, vec![3])]));
    }

    #[test]
    fn a_queue_without_a_cpu_that_can_be_is_refused() {
        for (affinity, said) in [
            ("[1@[0],1@[1]]", "--disk queue_affinity=[1@...]: the queue is there twice; give all of its CPUs at once"),
            ("[1@[]]", "--disk queue_affinity=[1@...]: a queue needs a CPU of the host to run on; give one, or more"),
            (
                "[0@[1024]]",
                "--disk queue_affinity=[0@...]: CPU 1024 of the host: they are numbered 0 to 1023; give one of these",
            ),
        ] {
            assert_eq!(planned(&format!("path=/d,num_queues=2,queue_affinity={affinity}")), Err(said.to_string()));
        }
        let said = planned("vhost_user=on,socket=/s,queue_affinity=[0@[0]]").unwrap_err();
        assert!(said.ends_with("its backend runs the queues; leave queue_affinity out"), "{said}");
    }
}
