package pluginpb

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// v1.binpb is protocol 1 as it was first released; it is never generated
// again. Whatever it has, today's code must have, under the same numbers.
func TestProtocol_KeepsEverythingOfVersion1(t *testing.T) {
	raw, err := os.ReadFile("v1.binpb")
	if err != nil {
		t.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(raw, &set); err != nil {
		t.Fatal(err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	frozen, err := files.FindFileByPath("plugin.proto")
	if err != nil {
		t.Fatal(err)
	}
	now := facts(File_plugin_proto)
	for fact := range facts(frozen) {
		for old, name := range renamed {
			fact = strings.Replace(fact, "field "+old+" ", "field "+name+" ", 1)
		}
		if !now[fact] {
			t.Errorf("gone or changed: %s", fact)
		}
	}
}

// renamed are fields with other names than in the first release. Names do not travel.
var renamed = map[string]string{"rnbd.plugin.v1.ErrorDetail.errno": "rnbd.plugin.v1.ErrorDetail.error_number"}

// facts are the properties that a peer relies on.
func facts(f protoreflect.FileDescriptor) map[string]bool {
	out := map[string]bool{}
	for i := range f.Messages().Len() {
		m := f.Messages().Get(i)
		out["message "+string(m.FullName())] = true
		for j := range m.Fields().Len() {
			d := m.Fields().Get(j)
			of := ""
			switch {
			case d.IsMap():
				of = fmt.Sprintf("map %s to %s", d.MapKey().Kind(), d.MapValue().Kind())
			case d.Message() != nil:
				of = string(d.Message().FullName())
			case d.Enum() != nil:
				of = string(d.Enum().FullName())
			}
			out[fmt.Sprintf("field %s = %d %s %s %s", d.FullName(), d.Number(), d.Cardinality(), d.Kind(), of)] = true
		}
	}
	for i := range f.Enums().Len() {
		for e, j := f.Enums().Get(i), 0; j < e.Values().Len(); j++ {
			out[fmt.Sprintf("value %s = %d", e.Values().Get(j).FullName(), e.Values().Get(j).Number())] = true
		}
	}
	for i := range f.Services().Len() {
		for s, j := f.Services().Get(i), 0; j < s.Methods().Len(); j++ {
			m := s.Methods().Get(j)
			out[fmt.Sprintf("method %s(%s) %s", m.FullName(), m.Input().FullName(), m.Output().FullName())] = true
		}
	}
	return out
}
