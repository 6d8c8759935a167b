package main

import (
	"context"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// attention has the conditions of the daemons that a list is of. Without a screen
// there are none.
type attention struct{ client, server []*controlpb.Condition }

// attention asks the daemons for their conditions.
func (c *call) attention(ctx context.Context, d *daemons) (a attention, err error) {
	if c.Machine() || !c.Screen {
		return a, nil
	}
	if d.client != nil {
		i, err := d.client.Info(ctx, &controlpb.InfoRequest{})
		if err != nil {
			return a, err
		}
		a.client = i.Conditions
	}
	if d.server != nil {
		i, err := d.server.Info(ctx, &controlpb.InfoRequest{})
		if err != nil {
			return a, err
		}
		a.server = i.Conditions
	}
	return a, nil
}

// things names what needs attention: each kind of condition and its subject once.
func (a attention) things() (out []string) {
	for _, one := range slices.Concat(a.client, a.server) {
		if thing := strings.TrimSpace(one.Kind + " " + one.Subject); !slices.Contains(out, thing) {
			out = append(out, thing)
		}
	}
	return out
}

// noteDevices adds to the rows of devices what needs attention.
func (a attention) noteDevices(t report.Table, all []device) {
	for i, d := range all {
		conditions, subject := a.client, d.name
		if d.mapped == nil {
			conditions, subject = a.server, d.node
		}
		t.Rows[i].Notes = notes(conditions, subject, func(check string) bool { return check != "session" })
	}
}

// noteSessions adds to the rows of a client's sessions what needs attention.
func (a attention) noteSessions(t report.Table, all []session) {
	for i, s := range all {
		if !s.incoming {
			t.Rows[i].Notes = notes(a.client, s.Name, func(check string) bool { return check == "session" })
		}
	}
}

// notePaths adds to the rows of paths why they are not connected.
func notePaths(t report.Table, all []transportPath) {
	for i, p := range all {
		if !connected(p.Path) && p.LastError != "" {
			t.Rows[i].Notes = []string{p.State + ": " + p.LastError}
		}
	}
}

// notes are the texts of the conditions of a subject whose check fits.
func notes(all []*controlpb.Condition, subject string, fits func(check string) bool) (out []string) {
	for _, one := range all {
		if one.Subject == subject && fits(conditionChecks[one.Kind]) {
			out = append(out, one.Kind+": "+one.Text)
		}
	}
	return out
}
