//! A VF while what is written to the guest's memory is noted, as it is while the guest moves to another VMM.

use integration::migration_wire::{Point, Then};
use integration::{Backend, Kernel, Pf, Plan, Subnet};
use serde_json::json;

use crate::IDLE;
use crate::container::Container;
use crate::figures::{Bench, Server, Settings};

/// The network of the VF.
const SUBNET: Subnet = Subnet(0);
/// The backends whose VFs are measured, and what they are called.
const BACKENDS: [(Backend, &str); 2] = [(Backend::Tap, "tap"), (Backend::VhostNet, "vhost-net")];

/// Measures a VF over each backend before a migration, in the middle of one, and after it has failed.
///
/// In the middle, all memory has been sent once and nothing is being sent, so that the machine's only processor has no
/// work but the guest's.
pub(crate) fn measure(settings: Settings<'_>) {
    for (backend, name) in BACKENDS {
        let [here, there] = ["a", "b"].map(|place| Plan::new(place, &[backend]));
        let mut here = here.boot(Kernel::V6_12, |spec| spec.kernel_argument("tsc=reliable"));
        let there = there.wait(&[]);
        let pf = Pf::find(&mut here.guest);
        pf.set_num_vfs(&mut here.guest, 1);
        here.guest.wait_for(IDLE);
        let _server = Server::start("0.0.0.0");
        here.backends.taps()[0].join(SUBNET);
        let interface = pf.vfs(&mut here.guest)[0].interface().to_owned();
        let container = Container::new(&mut here.guest, "vf", SUBNET.host());
        container.give(&mut here.guest, &interface, &format!("{}/24", SUBNET.guest()));
        here.guest.wait_for(&container.inside(&format!("ping -c 1 -W 1 {}", SUBNET.host())));

        Bench { guest: &mut here.guest, settings }.measure(&format!("{name}: before"), &container);
        let wire = here.send_until(&there, Point::Frame(4, 0), &json!({}));
        Bench { guest: &mut here.guest, settings }.measure(&format!("{name}: logged"), &container);
        assert_eq!(here.api.get("vm.migration-progress").body["state"], "active");
        wire.goes(Then::IsCut);
        here.ended();
        there.ended();
        Bench { guest: &mut here.guest, settings }.measure(&format!("{name}: after"), &container);
    }
}
