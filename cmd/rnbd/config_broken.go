package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/config"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
)

// brokenFiles are files of the client's folder that a start has left out.
type brokenFiles struct {
	problems []string // errors, and mappings that are not made therefore
	names    []string // of devices that the files ask for, as far as they can be read
}

// loadAtStart is load for a start. A file of the folder that is broken costs only its
// own mappings, if it can have had nothing else: any other setting may be one that
// protects. A process that goes on in place of another one takes all files or none,
// since a mapping that it does not find would be taken away.
func (o *clientOptions) loadAtStart(cmd *cobra.Command, pre *handover.Predecessor) error {
	if pre != nil {
		return o.load(cmd)
	}
	if err := o.loadSparing(cmd, o.spare); err != nil {
		return err
	}
	o.holdBack()
	return nil
}

// spare is a spareFile.
func (o *clientOptions) spare(file string, text []byte, err error) error {
	if file == o.Config || file == systemFile("client") {
		return err
	}
	r := config.Inspect(file, text, &clientOptions{}, keyMappings)
	if r.Other != "" {
		return fmt.Errorf("%w\n%s: the daemon does not start without the file, which has, or may have had, more than mappings: %s", err, file, r.Other)
	}
	o.Mappings = nil
	o.broken.problems = append(o.broken.problems, oneLine(err)+"; the mappings of the file are not made: correct it, then run rnbd config apply")
	o.broken.names = append(o.broken.names, r.Names...)
	return nil
}

// holdBack leaves out mappings with a name that a broken file has, too: users know
// one of both devices by it.
func (o *clientOptions) holdBack() {
	o.Mappings = slices.DeleteFunc(o.Mappings, func(m mappings.Mapping) bool {
		twice := m.Name != "" && slices.Contains(o.broken.names, m.Name)
		if twice {
			o.broken.problems = append(o.broken.problems, fmt.Sprintf("the mapping of %s as %q is not made: a file that is broken has a mapping of this name, too", m.Device, m.Name))
		}
		return twice
	})
}

// deviceNames are those that the configuration asks for. Devices that are mapped without
// a name must not have them: their own server may be away at the moment.
func (o *clientOptions) deviceNames() []string {
	names := slices.Clone(o.broken.names)
	for _, m := range o.Mappings {
		if m.Name != "" {
			names = append(names, m.Name)
		}
	}
	return names
}
