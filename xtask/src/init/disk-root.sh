#!/bin/sh
# The init of a guest whose root file system is on its first disk: loads the disk's driver and gives way to the init there.

export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in /modules/* /extra/virtio_blk/*; do
    [ ! -e "$module" ] || insmod "$module" || echo "cannot load $module"
done
waited=0
until [ -b /dev/vda ] || [ $waited -eq 500 ]; do
    usleep 20000
    waited=$((waited + 1))
done
mkdir /disk
mount -t ext4 /dev/vda /disk || poweroff -f
for tree in dev proc sys; do
    mount --move /$tree /disk/$tree
done
exec switch_root /disk /sbin/init
